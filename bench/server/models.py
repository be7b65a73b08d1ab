"""The models of the benchmark, as a Triton repository: the same ONNX files for every server.

`recommender` is that of `forebay repository demo`: a user's number becomes the ten best of 2,000 items. `embedding`
is bge-small-en-v1.5 with int8 weights on 16 token ids, cut down to what clients want of it: the normalised vector of
the first token. One row of one is microseconds of work, one of the other milliseconds. `ranking` is an ensemble of
three: 200 candidates for a user by the products of factors, a network of two hidden layers that scores each, and the
ten best; every server runs its files in one process. `ranking-large` has 1,000 candidates. Their weights are random:
how fast they are does not depend on them. All batch, up to 32 rows.
"""

import json
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
IN_PROCESS: Final = 'parameters { key: "forebay.in_process" value { string_value: "true" } }\n'
"""Forebay then runs the steps of an ensemble in one process, as the others run the files."""
BACKEND: Final = "onnxruntime"

CANDIDATES: Final = {"ranking": 200, "ranking-large": 1000}
"""Items that the first step hands to the second."""
BEST: Final = 10
USERS, ITEMS, RANK, HIDDEN = 4000, 2000, 32, 256

Tensors = tuple[tuple[str, str, int], ...]
"""Name, datatype and width of each."""


@dataclass(frozen=True)
class Step:
    """One step of an ensemble, whose tensors are called alike in all of it."""

    name: str
    inputs: Tensors
    outputs: Tensors


@dataclass(frozen=True)
class Model:
    """One model: its only input is INT64, and a request is one row of it."""

    name: str
    input: str
    row: tuple[int, ...]
    outputs: Tensors
    max_batch: int
    steps: tuple[Step, ...] = ()
    """In order, if it is an ensemble."""

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of its ONNX files, in the order in which they run."""
        return tuple(step.name for step in self.steps) or (self.name,)

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
    def given(self) -> Tensors:
        """The inputs."""
        return ((self.input, "INT64", len(self.row)),)

    def config(self, backend: str) -> str:
        """The config.pbtxt of one model that does all."""
        return self._config(Step(self.name, self.given, self.outputs), backend)

    @property
    def configs(self) -> dict[str, str]:
        """The config.pbtxt of each folder, with an ensemble where there are steps."""
        if not self.steps:
            return {self.name: self.config(BACKEND)}
        found = {step.name: self._config(step, BACKEND) for step in self.steps}
        steps = ", ".join(_mapped(step) for step in self.steps)
        head = self._head(self.name, self.given, self.outputs)
        whole = f'platform: "ensemble"\nensemble_scheduling {{ step [ {steps} ] }}\n'
        return found | {self.name: head + whole + IN_PROCESS}

    def _config(self, step: Step, backend: str) -> str:
        return f"""{self._head(step.name, step.inputs, step.outputs)}backend: "{backend}"
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}
"""

    def _head(self, name: str, inputs: Tensors, outputs: Tensors) -> str:
        shown = [
            ", ".join(f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {n} ] }}' for name, kind, n in tensors)
            for tensors in (inputs, outputs)
        ]
        return f"""name: "{name}"
max_batch_size: {self.max_batch}
input [ {shown[0]} ]
output [ {shown[1]} ]
"""


def _mapped(step: Step) -> str:
    maps = [
        f'{which}_map {{ key: "{name}" value: "{name}" }}'
        for which, tensors in (("input", step.inputs), ("output", step.outputs))
        for name, _, _ in tensors
    ]
    return f'{{ model_name: "{step.name}" model_version: -1 {" ".join(maps)} }}'


_FOUND: Final[Tensors] = (("ITEM", "INT64", BEST), ("SCORE", "FP32", BEST))


def _ranking(name: str) -> Model:
    user, chosen, chances = (
        ("USER", "INT64", 1),
        ("CANDIDATE", "INT64", CANDIDATES[name]),
        ("CHANCE", "FP32", CANDIDATES[name]),
    )
    steps = (
        Step("recall", (user,), (chosen,)),
        Step("score", (user, chosen), (chances,)),
        Step("choose", (chosen, chances), _FOUND),
    )
    return Model(name, "USER", (1234,), _FOUND, 32, steps)


MODELS: Final = (
    Model("recommender", "USER", (1234,), _FOUND, 32),
    Model(
        "embedding",
        "IDS",
        (FIRST_TOKEN, *range(2000, 2000 + TOKENS - 2), LAST_TOKEN),
        (("EMBEDDING", "FP32", WIDTH),),
        32,
    ),
    *map(_ranking, CANDIDATES),
)


def write(folder: Path) -> None:
    """Write a repository `NAME` for each model; what is there stays."""
    makers = {
        "recommender": _recommender,
        "embedding": _embedding,
        **dict.fromkeys(("recall", "score", "choose"), _step),
    }
    for model in MODELS:
        for name, config in model.configs.items():
            place = folder / model.name / name
            (place / "1").mkdir(parents=True, exist_ok=True)
            (place / "config.pbtxt").write_text(config)
        for name in model.folders:
            target = folder / model.name / name / "1/model.onnx"
            if not target.exists():
                makers.get(name, _step)(target)


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


def _weights(candidates: int) -> dict[str, Any]:
    """The constants of all steps of a ranking."""
    import numpy as np

    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)

    items = matrix(ITEMS, RANK)
    return {
        "users": matrix(USERS, RANK),
        "items": items,
        "items_across": items.T.copy(),
        "first": matrix(2 * RANK, HIDDEN),
        "second": matrix(HIDDEN, HIDDEN),
        "last": matrix(HIDDEN, 1),
        "flat": np.array([-1]),
        "rows": np.array([-1, candidates]),
        "candidates": np.array([candidates]),
        "best": np.array([BEST]),
    }


def _step(target: Path) -> None:
    """A step of a ranking, by the names of its folder and of the repository."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    name, model_name = target.parents[1].name, target.parents[2].name
    node = helper.make_node
    nodes = {
        "recall": [
            node("Reshape", ["USER", "flat"], ["row"]),
            node("Gather", ["users", "row"], ["user"]),
            node("MatMul", ["user", "items_across"], ["likeness"]),
            node("TopK", ["likeness", "candidates"], ["most", "CANDIDATE"], axis=1),
        ],
        "score": [
            node("Gather", ["users", "USER"], ["user"]),
            node("Gather", ["items", "CANDIDATE"], ["item"]),
            node("Mul", ["user", "item"], ["both"]),
            node("Concat", ["both", "item"], ["features"], axis=2),
            node("MatMul", ["features", "first"], ["first_sum"]),
            node("Relu", ["first_sum"], ["first_layer"]),
            node("MatMul", ["first_layer", "second"], ["second_sum"]),
            node("Relu", ["second_sum"], ["second_layer"]),
            node("MatMul", ["second_layer", "last"], ["chances"]),
            node("Reshape", ["chances", "rows"], ["CHANCE"]),
        ],
        "choose": [
            node("TopK", ["CHANCE", "best"], ["SCORE", "place"], axis=1),
            node("GatherElements", ["CANDIDATE", "place"], ["ITEM"], axis=1),
        ],
    }[name]
    steps = next(model.steps for model in MODELS if model.name == model_name)
    step = next(step for step in steps if step.name == name)
    types = {"INT64": TensorProto.INT64, "FP32": TensorProto.FLOAT}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, types[kind], ["batch", width]) for name, kind, width in tensors]
        for tensors in (step.inputs, step.outputs)
    )
    used = {name for each in nodes for name in each.input}
    kept = [
        numpy_helper.from_array(value, name)
        for name, value in _weights(CANDIDATES[model_name]).items()
        if name in used
    ]
    graph = helper.make_graph(nodes, name, inputs, outputs, kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    target.write_bytes(model.SerializeToString())
