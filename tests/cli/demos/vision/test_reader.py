"""The reader of lines with less to say says the same."""

from pathlib import Path

import numpy as np
import pytest

from forebay.cli.repository.demos.vision.reader import make_characters, make_network

onnx = pytest.importorskip("onnx", reason="needs the extra 'vision'")
runtime = pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Its output is the softmax of its input."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["chances"], axis=2)],
        "reader",
        [helper.make_tensor_value_info("x", kind, ["lines", "places", 3])],
        [helper.make_tensor_value_info("chances", kind, ["lines", "places", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    helper.set_model_props(model, {"character": "a\n字\n"})
    onnx.save(model, str(tmp_path / "network.onnx"))
    return tmp_path / "network.onnx"


def test_network_returns_the_most_likely_character_and_its_probability(network: Path, tmp_path: Path) -> None:
    make_network(tmp_path / "made.onnx", [network])

    session = runtime.InferenceSession(str(tmp_path / "made.onnx"))
    pixels = np.random.default_rng(1).standard_normal((2, 5, 3)).astype(np.float32)
    numbers, sure = session.run(["CHARACTER", "SURE"], {"PIXELS": pixels})
    chances = np.exp(pixels) / np.exp(pixels).sum(axis=2, keepdims=True)
    np.testing.assert_array_equal(numbers, chances.argmax(axis=2))
    np.testing.assert_allclose(sure, chances.max(axis=2), rtol=1e-5)


def test_characters_are_read_from_the_network_file(network: Path, tmp_path: Path) -> None:
    make_characters(tmp_path / "characters.txt", [network])

    assert (tmp_path / "characters.txt").read_text(encoding="utf-8") == "a\n字"
