"""Models that read one position, rewritten: the same results from less work, or the same model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from forebay.engines.tensor.onnx_model.narrowing import narrow, narrowed

WIDTH, POSITIONS = 8, 5
node = helper.make_node


def weights(name: str, *dims: int) -> onnx.TensorProto:
    random = np.random.default_rng(len(name) + sum(name.encode()))
    return numpy_helper.from_array(random.standard_normal(dims).astype(np.float32), name)


def number(name: str, value: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, np.int64), name)


def model(nodes: Sequence[onnx.NodeProto], *outputs: tuple[str, int], opset: int = 17) -> onnx.ModelProto:
    """An encoder's end: `X` is what its last attention has mixed, [batch, POSITIONS, WIDTH]."""
    constants = [
        weights("W", WIDTH, WIDTH),
        weights("V", WIDTH, WIDTH),
        weights("bias", WIDTH),
        weights("scale", WIDTH),
        number("first", 0),
        number("last", -1),
        number("second", 1),
        number("both", [0, 1]),
        numpy_helper.from_array(np.array(1e-5, np.float32), "tiny"),
        numpy_helper.from_array(np.array(2, np.float32), "two"),
    ]
    graph = helper.make_graph(
        nodes,
        "end",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", "positions", WIDTH])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in outputs],
        constants,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(made)
    return made


def copy(of: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(of)
    return made


def run(which: onnx.ModelProto, batch: int = 3) -> list[np.ndarray[Any, Any]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(which.SerializeToString(), options)
    x = np.random.default_rng(1).standard_normal((batch, POSITIONS, WIDTH)).astype(np.float32)
    found: list[np.ndarray[Any, Any]] = session.run(None, {"X": x})
    return found


def sizes(of: onnx.ModelProto) -> dict[str, int]:
    """Positions of each product, by the name of its output."""
    made = copy(of)
    names = [each.output[0] for each in made.graph.node if each.op_type in ("MatMul", "MatMulInteger")]
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return dict(zip(names, (each.shape[1] for each in run(made)[-len(names) :]), strict=True))


FEED = [
    node("MatMul", ["X", "W"], ["wide"]),
    node("Add", ["wide", "bias"], ["biased"]),
    node("Relu", ["biased"], ["active"]),
    node("MatMul", ["active", "V"], ["back"]),
    node("Add", ["back", "X"], ["sum"]),
]
NORM = [
    node("ReduceMean", ["sum"], ["mean"], axes=[-1]),
    node("Sub", ["sum", "mean"], ["off"]),
    node("Pow", ["off", "two"], ["square"]),
    node("ReduceMean", ["square"], ["variance"], axes=[2]),
    node("Add", ["variance", "tiny"], ["more"]),
    node("Sqrt", ["more"], ["deviation"]),
    node("Div", ["off", "deviation"], ["hidden"]),
]


@pytest.mark.parametrize("index", ["first", "last"])
@pytest.mark.parametrize("axis", [1, -2])
def test_only_the_position_that_is_read_is_computed(index: str, axis: int) -> None:
    whole = model([*FEED, *NORM, node("Gather", ["hidden", index], ["Y"], axis=axis)], ("Y", 2))
    less = copy(whole)
    assert narrow(less)
    assert sizes(whole) == {"wide": POSITIONS, "back": POSITIONS}
    assert sizes(less) == {"wide": 1, "back": 1}
    np.testing.assert_allclose(run(less)[0], run(whole)[0], rtol=1e-5, atol=1e-6)


LAYER_NORM = node("LayerNormalization", ["sum", "scale", "bias"], ["hidden"])


def read(position: str, axis: int) -> onnx.NodeProto:
    return node("Gather", ["hidden", position], ["Y"], axis=axis)


READ = read("first", 1)


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        pytest.param([*FEED, LAYER_NORM, READ], [("Y", 2), ("hidden", 3)], id="all positions are an output"),
        pytest.param(
            [*FEED, LAYER_NORM, READ, node("ReduceMean", ["hidden"], ["Z"], axes=[1])],
            [("Y", 2), ("Z", 3)],
            id="others read them",
        ),
        pytest.param([*FEED, LAYER_NORM, read("second", 1)], [("Y", 2)], id="second"),
        pytest.param([*FEED, LAYER_NORM, read("both", 1)], [("Y", 3)], id="two"),
        pytest.param([*FEED, LAYER_NORM, read("first", 2)], [("Y", 2)], id="width"),
        pytest.param([node("Gather", ["X", "first"], ["Y"], axis=1)], [("Y", 2)], id="nothing before it"),
        pytest.param(
            [node("Softmax", ["X"], ["sum"], axis=1), LAYER_NORM, READ], [("Y", 2)], id="positions are mixed"
        ),
        pytest.param(
            [
                node("MatMul", ["X", "W"], ["a"]),
                node("Transpose", ["a"], ["b"], perm=[0, 2, 1]),
                node("MatMul", ["a", "b"], ["c"]),
                node("Gather", ["c", "first"], ["Y"], axis=1),
            ],
            [("Y", 2)],
            id="a product of two sequences",
        ),
    ],
)
def test_other_models_stay_as_they_are(nodes: list[onnx.NodeProto], outputs: list[tuple[str, int]]) -> None:
    whole = model(nodes, *outputs)
    same = copy(whole)
    assert not narrow(same)
    assert same == whole


UNARY = ("Relu", "Tanh", "Erf", "Sigmoid", "Identity")


@given(st.data())
def test_any_graph_gives_the_same_results(data: st.DataObject) -> None:
    """Random graphs, in which tensors are also read elsewhere."""
    nodes: list[onnx.NodeProto] = []
    made = ["X"]
    for step in range(data.draw(st.integers(1, 10))):
        out, source = f"t{step}", data.draw(st.sampled_from(made))
        match data.draw(st.sampled_from(["unary", "binary", "bias", "product", "mean", "mix", "norm"])):
            case "unary":
                nodes.append(node(data.draw(st.sampled_from(UNARY)), [source], [out]))
            case "binary":
                kind = data.draw(st.sampled_from(["Add", "Sub", "Mul"]))
                nodes.append(node(kind, [source, data.draw(st.sampled_from(made))], [out]))
            case "bias":
                nodes.append(node("Add", ["bias", source], [out]))
            case "product":
                nodes.append(node("MatMul", [source, "W"], [out]))
            case "mean":
                axis = data.draw(st.sampled_from([1, 2, -1]))
                nodes.append(node("ReduceMean", [source], [f"{out}m"], axes=[axis]))
                nodes.append(node("Sub", [source, f"{out}m"], [out]))
            case "mix":
                nodes.append(node("Softmax", [source], [out], axis=1))
            case _:
                nodes.append(node("LayerNormalization", [source, "scale", "bias"], [out]))
        made.append(out)
    index, axis = data.draw(st.sampled_from(["first", "last"])), data.draw(st.sampled_from([1, 1, 0]))
    nodes.append(node("Gather", [made[-1], index], ["Y"], axis=axis))
    outputs = [("Y", 2)]
    if data.draw(st.booleans()):
        outputs.append((data.draw(st.sampled_from(made[1:])), 3))
    whole = model(nodes, *outputs)
    less = copy(whole)
    narrow(less)
    onnx.checker.check_model(less)
    for found, wanted in zip(run(less), run(whole), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_files_that_are_not_understood_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    for content in (b"", b"no model", model([*FEED, LAYER_NORM, READ], ("Y", 2)).SerializeToString()[:-9]):
        file.write_bytes(content)
        assert narrowed(file) is None
