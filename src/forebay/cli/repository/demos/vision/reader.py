"""The recogniser of PP-OCRv4 with a smaller output, and its character set."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

INPUT: Final = "x"
CHARACTERS: Final = "character"
"""Metadata key of the character set: one character per line."""


def make_network(target: Path, parts: Sequence[Path]) -> None:
    """Write the network with the most likely character as its output, instead of 6625 probabilities.

    Input: `PIXELS`, FP32 [lines, 3, 48, width]; outputs: `CHARACTER`, INT64, and `SURE`, FP32, both [lines, places].
    """
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load(parts[0])
    graph = model.graph
    graph.input[0].name = "PIXELS"
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name == INPUT:
                node.input[place] = "PIXELS"
    chances = graph.output[0].name
    graph.node.extend(
        [
            helper.make_node("ArgMax", [chances], ["CHARACTER"], axis=2, keepdims=0),
            helper.make_node("ReduceMax", [chances], ["SURE"], axes=[2], keepdims=0),
        ]
    )
    del graph.output[:]
    graph.output.extend(
        helper.make_tensor_value_info(name, kind, ["lines", "places"])
        for name, kind in (("CHARACTER", TensorProto.INT64), ("SURE", TensorProto.FLOAT))
    )
    onnx.checker.check_model(model)
    target.write_bytes(model.SerializeToString())


def make_characters(target: Path, parts: Sequence[Path]) -> None:
    """Write the character set of the network, one character per line."""
    import onnx

    about: dict[str, Any] = {each.key: each.value for each in onnx.load(parts[0]).metadata_props}
    target.write_text("\n".join(about[CHARACTERS].splitlines()), encoding="utf-8")
