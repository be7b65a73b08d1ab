"""A repository with models that compute on a GPU, or must not."""

import warnings
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import torch

SIZE = 64
WIDE = 300_000
"""Two rows of it are more than a megabyte."""
WEIGHTS = np.random.default_rng(5).standard_normal((SIZE, SIZE)).astype(np.float32)

TOLD = """
import json
import os

import numpy as np
import torch
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self.device = torch.device(f"{'cuda' if args['model_instance_kind'] == 'GPU' else 'cpu'}:" +
                                   args["model_instance_device_id"])
        self.told = json.dumps({"kind": args["model_instance_kind"], "pid": os.getpid(),
                                "seen": os.environ.get("CUDA_VISIBLE_DEVICES", "")})

    def execute(self, requests):
        answers = []
        for request in requests:
            given = pb.get_input_tensor_by_name(request, "INPUT__0").as_numpy()
            doubled = torch.from_numpy(given.copy()).to(self.device) * 2
            told = np.array([[self.told.encode()]] * len(given), np.object_)
            outputs = [pb.Tensor.from_dlpack("OUTPUT__0", doubled), pb.Tensor("TOLD", told)]
            answers.append(pb.InferenceResponse(outputs))
        return answers
"""
BUSY = """
import os

import numpy as np
import torch
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        torch.zeros(1, device="cuda")
        with open(os.path.join(os.path.dirname(__file__), "pid"), "w") as file:
            file.write(str(os.getpid()))

    def execute(self, requests):
        with open(os.path.join(os.path.dirname(__file__), "begun"), "w") as file:
            torch.cuda._sleep(20_000_000_000)
            file.write("computing")
        torch.cuda.synchronize()
        return [pb.InferenceResponse([pb.Tensor("OUTPUT__0", np.zeros((1, 64), np.float32))]) for _ in requests]
"""
CONFIG = """
max_batch_size: 8
input { name: "INPUT__0" data_type: TYPE_FP32 dims: 64 }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 64 }
"""


class Table(torch.nn.Module):
    """An index outside of it is an error on a CPU, and the end of everything on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding.from_pretrained(torch.from_numpy(WEIGHTS))

    def forward(self, INPUT__0: torch.Tensor) -> torch.Tensor:  # noqa: N803 - a name of the protocol
        return self.rows(INPUT__0)


class Matrix(torch.nn.Module):
    """It makes a tensor of its own: where an exported program does so has to be changed too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.from_numpy(WEIGHTS))

    def forward(self, INPUT__0: torch.Tensor) -> torch.Tensor:  # noqa: N803 - a name of the protocol
        return INPUT__0 @ self.weights + torch.ones(64, device=INPUT__0.device)


class Greedy(torch.nn.Module):
    """Asks for so many bytes."""

    def forward(self, INPUT__0: torch.Tensor) -> torch.Tensor:  # noqa: N803 - a name of the protocol
        size = int(INPUT__0[0, 0].item())
        return torch.zeros(size, dtype=torch.uint8, device=INPUT__0.device)[:1].view(1, 1)


class Twice(torch.nn.Module):
    """As much out as in."""

    def forward(self, INPUT__0: torch.Tensor) -> torch.Tensor:  # noqa: N803 - a name of the protocol
        return INPUT__0 * 2


def write(folder: Path) -> None:
    """All of them."""
    example = torch.zeros(2, SIZE)
    batch = torch.export.Dim("batch", min=1, max=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        scripts: dict[str, Any] = {
            "matrix": torch.jit.script(Matrix().eval()),
            "table": torch.jit.script(Table().eval()),
            "greedy": torch.jit.script(Greedy()),
            "wide": torch.jit.script(Twice()),
        }
        program = torch.export.export(Matrix().eval(), (example,), dynamic_shapes=({0: batch},))
    configs = {
        "matrix": CONFIG + "instance_group { count: 2 } dynamic_batching {}",
        "table": """
            max_batch_size: 8
            input { name: "INPUT__0" data_type: TYPE_INT64 dims: 1 }
            output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [1, 64] }
        """,
        "greedy": """
            input { name: "INPUT__0" data_type: TYPE_INT64 dims: [1, 1] }
            output { name: "OUTPUT__0" data_type: TYPE_UINT8 dims: [1, 1] }
            parameters { key: "forebay.gpu_memory_fraction" value { string_value: "0.05" } }
        """,
        "wide": f"""
            max_batch_size: 8
            input {{ name: "INPUT__0" data_type: TYPE_FP32 dims: {WIDE} }}
            output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: {WIDE} }}
            instance_group {{ count: 2 }}
            dynamic_batching {{ max_queue_delay_microseconds: 20000 }}
        """,
    }
    for name, script in scripts.items():
        script.save(str(_model(folder, name, 'backend: "pytorch"' + configs[name]) / "model.pt"))
    on_cpu = _model(folder, "matrix_cpu", 'backend: "pytorch"' + CONFIG + "instance_group { kind: KIND_CPU }")
    scripts["matrix"].save(str(on_cpu / "model.pt"))
    torch.export.save(program, str(_model(folder, "exported", 'backend: "pytorch"' + CONFIG) / "model.pt2"))
    told = CONFIG + 'output { name: "TOLD" data_type: TYPE_STRING dims: 1 }'
    (_model(folder, "told", 'backend: "python"' + told) / "model.py").write_text(TOLD)
    mixed = told + "instance_group [ { kind: KIND_CPU }, { kind: KIND_GPU } ]"
    (_model(folder, "mixed", 'backend: "python"' + mixed) / "model.py").write_text(TOLD)
    (_model(folder, "busy", 'backend: "python"' + CONFIG) / "model.py").write_text(BUSY)


def write_onnx(folder: Path) -> None:
    """The matrix for ONNX Runtime, on a GPU with little memory and on a CPU."""
    from onnx import TensorProto, helper, numpy_helper, save

    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["INPUT__0", "weights"], ["product"]),
            helper.make_node("Add", ["product", "one"], ["OUTPUT__0"]),
        ],
        "matrix",
        [helper.make_tensor_value_info("INPUT__0", TensorProto.FLOAT, ["batch", SIZE])],
        [helper.make_tensor_value_info("OUTPUT__0", TensorProto.FLOAT, ["batch", SIZE])],
        [numpy_helper.from_array(WEIGHTS, "weights"), numpy_helper.from_array(np.ones(SIZE, np.float32), "one")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    share = 'parameters { key: "forebay.gpu_memory_fraction" value { string_value: "0.02" } }'
    exact = 'parameters { key: "use_tf32" value { string_value: "0" } }'
    on_cpu = "instance_group { kind: KIND_CPU }"
    for name, more in (("matrix_onnx", share), ("matrix_onnx_fp32", exact), ("matrix_onnx_cpu", on_cpu)):
        save(model, str(_model(folder, name, 'backend: "onnxruntime"' + CONFIG + more) / "model.onnx"))


def _model(folder: Path, name: str, config: str) -> Path:
    version = folder / name / "1"
    version.mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(dedent(config))
    return version
