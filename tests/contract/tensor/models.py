"""Tiny models for the contract of tensor backends, one builder per backend: `identity` and `add_sub`."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Never

import numpy as np

from forebay.core.serving.config import Datatype, InstanceGroup, ModelConfig, TensorSpec
from forebay.engines.tensor import create
from forebay.engines.tensor.protocol import Array, Backend, CallModel, Loaded, Request, Response

ALL = tuple(Datatype)
CARRIES: Mapping[str, tuple[Datatype, ...]] = {
    "onnxruntime": ALL,
    "openvino": ALL,
    "pytorch": tuple(each for each in ALL if each is not Datatype.BYTES),
    "python": ALL,
}
"""PyTorch takes strings as a list of one dimension: see its own tests."""


def sample(datatype: Datatype, backend: str = "") -> Array:
    """Values of every sign and size that matters, shape [3, 4]."""
    rows = 3
    if backend == "openvino" and datatype in (Datatype.INT64, Datatype.UINT64):
        low = np.iinfo(datatype.lower()).min  # its CPU plugin computes with 32 bits: see its own tests
        return sample(Datatype.INT32).clip(max(low, np.iinfo(np.int32).min)).astype(datatype.lower())
    if backend == "openvino" and datatype is Datatype.FP64:
        return np.array([0.5, -2.0, 0.25, 3e38] * rows, "<f4").astype("<f8").reshape(rows, 4)
    match datatype:
        case Datatype.BYTES:
            values = np.array([b"", b"plain", "naïve".encode(), b"a" * 1000] * rows, object)
        case Datatype.BOOL:
            values = np.array([True, False, True, True] * rows)
        case Datatype.BF16:
            values = np.array([0x3F80, 0xBF80, 0x0000, 0x7F80] * rows, "<u2")
        case Datatype.FP16 | Datatype.FP32 | Datatype.FP64:
            kind = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}[datatype]
            values = np.array([0.5, -2.0, np.inf, 1e-3] * rows, kind)
        case _:
            kind = np.dtype(datatype.lower())
            values = np.array([0, 1, np.iinfo(kind).min, np.iinfo(kind).max] * rows, kind)
    return values.reshape(rows, 4)


def spec(name: str, datatype: Datatype, *dims: int) -> TensorSpec:
    return TensorSpec(name, datatype, dims)


def config(backend: str, datatype: Datatype, kind: str, **changed: object) -> ModelConfig:
    """The configuration that belongs to a model made here."""
    inputs = ("X",) if kind == "identity" else ("A", "B")
    outputs = ("Y",) if kind == "identity" else ("SUM", "DIFF")
    given = {
        "name": f"{kind}_{backend}",
        "backend": backend,
        "max_batch": 64,
        "inputs": tuple(spec(name, datatype, 4) for name in inputs),
        "outputs": tuple(spec(name, datatype, 4) for name in outputs),
    }
    return ModelConfig(**(given | changed))  # type: ignore[arg-type]


def build(backend: str, kind: str, datatype: Datatype, folder: Path) -> None:
    """Write the model that `config` describes."""
    folder.mkdir(parents=True, exist_ok=True)
    {"onnxruntime": _onnx, "openvino": _openvino, "pytorch": _torch, "python": _python}[backend](
        kind, datatype, folder
    )


def _onnx(kind: str, datatype: Datatype, folder: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    names = {"FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BF16": "BFLOAT16", "BYTES": "STRING"}
    element = TensorProto.DataType.Value(names.get(datatype, datatype))

    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, element, ["rows", 4])

    if kind == "identity":
        graph = helper.make_graph([helper.make_node("Identity", ["X"], ["Y"])], "g", [value("X")], [value("Y")])
    else:
        nodes = [helper.make_node("Add", ["A", "B"], ["SUM"]), helper.make_node("Sub", ["A", "B"], ["DIFF"])]
        graph = helper.make_graph(nodes, "g", [value("A"), value("B")], [value("SUM"), value("DIFF")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, str(folder / "model.onnx"))


def _openvino(kind: str, datatype: Datatype, folder: Path) -> None:
    import openvino
    from openvino import opset13

    names = {"BOOL": "boolean", "FP16": "f16", "FP32": "f32", "FP64": "f64", "BF16": "bf16", "BYTES": "string"}
    default = datatype.replace("UINT", "u").replace("INT", "i")
    element = getattr(openvino.Type, names.get(datatype, default))

    def parameter(name: str) -> openvino.op.Parameter:
        made = opset13.parameter([-1, 4], element, name=name)
        made.output(0).set_names({name})
        return made

    if kind == "identity":
        inputs = [parameter("X")]
        results = [opset13.reshape(inputs[0], np.array([0, 4]), True).output(0)]
        outputs = ["Y"]
    else:
        inputs = [parameter("A"), parameter("B")]
        results = [opset13.add(*inputs).output(0), opset13.subtract(*inputs).output(0)]
        outputs = ["SUM", "DIFF"]
    model = openvino.Model([opset13.result(each) for each in results], inputs)
    for output, name in zip(model.outputs, outputs, strict=True):
        output.set_names({name})
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)


def _torch(kind: str, datatype: Datatype, folder: Path) -> None:
    import torch

    class Identity(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class AddSub(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a + b, a - b

    module = Identity() if kind == "identity" else AddSub()
    dynamic = tuple({0: torch.export.Dim.DYNAMIC} for _ in range(1 if kind == "identity" else 2))
    names = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "BF16": "bfloat16"}
    element = getattr(torch, names.get(datatype, datatype.lower()))
    given = tuple(torch.ones(2, 4).to(element) for _ in dynamic)
    program = torch.export.export(module, given, dynamic_shapes=dynamic)
    torch.export.save(program, folder / "model.pt2")


_PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = [tensor for tensor in request.inputs()]
            {body}
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
_IDENTITY = """
            if inputs[0].triton_dtype() == 14:  # BF16
                outputs = [pb_utils.Tensor.from_dlpack('Y', inputs[0])]
            else:
                outputs = [pb_utils.Tensor('Y', inputs[0].as_numpy())]
"""
_ADD_SUB = """
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in 'AB')
            outputs = [pb_utils.Tensor('SUM', a + b), pb_utils.Tensor('DIFF', a - b)]
"""


def _python(kind: str, datatype: Datatype, folder: Path) -> None:
    body = _IDENTITY if kind == "identity" else _ADD_SUB
    (folder / "model.py").write_text(_PYTHON.replace("            {body}\n", body))


class Emitted:
    """What a model has sent with `emit`."""

    def __init__(self) -> None:
        self.responses: list[tuple[int, Response | None, bool]] = []
        self.ended = threading.Semaphore(0)

    def __call__(self, index: int, response: Response | None, final: bool) -> None:
        self.responses.append((index, response, final))
        if final:
            self.ended.release()

    def of(self, index: int) -> list[tuple[Response | None, bool]]:
        """What was sent for one request of the batch."""
        return [(response, final) for place, response, final in self.responses if place == index]


def no_calls(*_: object) -> Never:
    raise AssertionError("this model calls no other")


def load(settings: ModelConfig, folder: Path, call: CallModel = no_calls) -> tuple[Backend, Loaded]:
    """The backend of a model, loaded as instance 0."""
    backend = create(settings.backend)
    return backend, backend.load(settings, folder, 0, call)


def run(backend: Backend, requests: Sequence[Request], instance: int = 0) -> list[Response]:
    """The responses of a model that is not decoupled."""
    found = backend.execute(instance, requests, Emitted())
    assert None not in found
    return [each for each in found if each is not None]


def ask(inputs: Mapping[str, Array], *wanted: str, **changed: object) -> Request:
    return Request("r", dict(inputs), wanted, **changed)  # type: ignore[arg-type]


TWO = (InstanceGroup(count=2),)


def build_sums(folder: Path) -> None:
    """Write an ONNX model that is told where the requests in its flat X are: their sums, and X doubled.

    The sums up to each bound less those up to the one before.
    """
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    given = [value("X", TensorProto.FLOAT, ["n"]), value("BOUNDS", TensorProto.INT32, ["r1"])]
    made = [value("SUM", TensorProto.FLOAT, ["r", 1]), value("DOUBLE", TensorProto.FLOAT, ["n"])]
    constants = [
        helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0]),
        helper.make_tensor("axis", TensorProto.INT64, [], [0]),
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
        helper.make_tensor("start", TensorProto.INT64, [1], [0]),
        helper.make_tensor("last", TensorProto.INT64, [1], [-1]),
        helper.make_tensor("end", TensorProto.INT64, [1], [2**31 - 1]),
    ]
    nodes = [
        helper.make_node("Concat", ["zero", "X"], ["padded"], axis=0),
        helper.make_node("CumSum", ["padded", "axis"], ["sums"]),
        helper.make_node("Gather", ["sums", "BOUNDS"], ["at"]),
        helper.make_node("Slice", ["at", "one", "end"], ["ends"]),
        helper.make_node("Slice", ["at", "start", "last"], ["starts"]),
        helper.make_node("Sub", ["ends", "starts"], ["each"]),
        helper.make_node("Unsqueeze", ["each", "one"], ["SUM"]),
        helper.make_node("Add", ["X", "X"], ["DOUBLE"]),
    ]
    graph = helper.make_graph(nodes, "g", given, made, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
