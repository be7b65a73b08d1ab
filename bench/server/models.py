"""The models of the benchmark, as a Triton repository: the same two ONNX files for every server.

`recommender` is that of `forebay repository demo`: a user's number becomes the ten best of 2,000 items. `embedding`
is bge-small-en-v1.5 with int8 weights on 16 token ids, cut down to what clients want of it: the normalised vector of
the first token. Both batch; one row of one is microseconds of work, one of the other milliseconds.
"""

import json
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.cli import settings
from forebay.cli.repository.demos import tabular, text
from forebay.cli.repository.demos.writing import write as write_demo

TOKENS: Final = 16
WIDTH: Final = 384
FIRST_TOKEN, LAST_TOKEN = 101, 102
"""`[CLS]` and `[SEP]` of BERT's vocabulary."""
WIDTHS: Final = {"INT64": 8, "FP32": 4}
"""Bytes of an element."""
DELAY_US: Final = 500
"""How long a batch waits for company, of servers that can be told."""


@dataclass(frozen=True)
class Model:
    """One model: its only input is INT64, and a request is one row of it."""

    name: str
    input: str
    row: tuple[int, ...]
    outputs: tuple[tuple[str, str, int], ...]
    """Name, datatype and width."""
    max_batch: int

    @property
    def binary(self) -> bytes:
        """The row as bytes."""
        return struct.pack(f"<{len(self.row)}q", *self.row)

    @property
    def answer(self) -> tuple[bytes, bytes]:
        """What the protocol answers: the JSON, and behind it as many bytes as the outputs have."""
        sizes = [WIDTHS[datatype] * width for _, datatype, width in self.outputs]
        outputs = [
            {"name": name, "datatype": datatype, "shape": [1, width], "parameters": {"binary_data_size": size}}
            for (name, datatype, width), size in zip(self.outputs, sizes, strict=True)
        ]
        document = {"model_name": self.name, "model_version": "1", "outputs": outputs}
        return json.dumps(document, separators=(",", ":")).encode(), bytes(sum(sizes))

    @property
    def config(self) -> str:
        """Its config.pbtxt, without backend and parameters."""
        kinds = {"INT64": "TYPE_INT64", "FP32": "TYPE_FP32"}
        outputs = ", ".join(
            f'{{ name: "{name}" data_type: {kinds[t]} dims: [ {n} ] }}' for name, t, n in self.outputs
        )
        return f"""name: "{self.name}"
max_batch_size: {self.max_batch}
input [ {{ name: "{self.input}" data_type: TYPE_INT64 dims: [ {len(self.row)} ] }} ]
output [ {outputs} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}
"""


MODELS: Final = (
    Model("recommender", "USER", (1234,), (("ITEM", "INT64", 10), ("SCORE", "FP32", 10)), 32),
    Model(
        "embedding",
        "IDS",
        (FIRST_TOKEN, *range(2000, 2000 + TOKENS - 2), LAST_TOKEN),
        (("EMBEDDING", "FP32", WIDTH),),
        8,
    ),
)


def write(folder: Path) -> None:
    """Write a repository `NAME` for each model; what is there stays."""
    for model, make in zip(MODELS, (_recommender, _embedding), strict=True):
        target = folder / model.name / model.name / "1/model.onnx"
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            make(target)
        (target.parents[1] / "config.pbtxt").write_text(model.config + 'backend: "onnxruntime"\n')


def _recommender(target: Path) -> None:
    tabular.make(target, ())


def _embedding(target: Path) -> None:
    """bge-small with a mask of ones and token types of zeros, and only the first token's vector, of length one."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    with tempfile.TemporaryDirectory() as folder:
        write_demo(text.MODELS[0], Path(folder), settings.home(), lambda *_: None)
        model = onnx.load(f"{folder}/{text.MODELS[0].name}/1/model.onnx")
    graph = model.graph
    hidden = graph.output[0].name
    node = helper.make_node
    one = numpy_helper.from_array(np.array([1], np.int64))
    before = [
        node("Shape", ["IDS"], ["ids_shape"]),
        node("ConstantOfShape", ["ids_shape"], ["attention_mask"], value=one),
        node(
            "ConstantOfShape",
            ["ids_shape"],
            ["token_type_ids"],
            value=numpy_helper.from_array(np.array([0], np.int64)),
        ),
        node("Identity", ["IDS"], ["input_ids"]),
    ]
    after = [
        node("Gather", [hidden, "first_token"], ["first_vector"], axis=1),
        node("LpNormalization", ["first_vector"], ["EMBEDDING"], axis=-1, p=2),
    ]
    nodes = [*before, *graph.node, *after]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(nodes)
    graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "first_token"))
    graph.input.append(helper.make_tensor_value_info("IDS", TensorProto.INT64, ["batch", TOKENS]))
    graph.output.append(helper.make_tensor_value_info("EMBEDDING", TensorProto.FLOAT, ["batch", WIDTH]))
    onnx.checker.check_model(model)
    target.write_bytes(model.SerializeToString())
