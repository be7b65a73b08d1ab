"""SSD MobileNet v2 as an OpenVINO model with a dynamic batch size, from TensorFlow's frozen graph.

The frozen graph resizes images and suppresses overlapping boxes in loops over the batch. Only the network between
these is kept: its input is resized images, its output all candidate boxes.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from forebay.registry.sources import SourceError

SIDE: Final = 300
"""Width and height of its input in pixels."""
START: Final = "Preprocessor/mul:0"
"""The first step after resizing, from 0 … 255 to 0 … 2. Its layout in OpenVINO is channels first."""
NETWORK: Final = "model.xml"
"""The file with the graph."""
ENDS: Final = {"BOX": "Postprocessor/Reshape_2:0", "SCORE": "Postprocessor/convert_scores:0"}
"""Outputs and the tensors they come from: boxes of all anchors (y, x, y, x; relative to height and width), and their
scores by class, of which the first is the background."""


class UnknownGraph(SourceError):  # noqa: N818 - states the condition
    """The graph is not the expected one; the text is for the user."""


def make(target: Path, parts: Sequence[Path]) -> None:
    """Write the weights to `target`, and the graph beside it. Raises `UnknownGraph`.

    Input: `PIXELS`, UINT8 [n, 300, 300, 3]. Outputs: `BOX`, FP32 [n, 1917, 4], and `SCORE`, FP32 [n, 1917, 91].
    """
    import openvino

    with TemporaryDirectory(dir=target.parent) as folder:
        openvino.save_model(_cut(openvino.Core().read_model(parts[0]), parts[0].name), Path(folder) / NETWORK)
        os.replace(Path(folder) / NETWORK, target.parent / NETWORK)
        os.replace((Path(folder) / NETWORK).with_suffix(".bin"), target)


def _cut(graph: Any, name: str) -> Any:
    """The part of the graph between its loops."""
    import openvino
    from openvino import opset13

    found = {name: output for step in graph.get_ordered_ops() for output in step.outputs() for name in output.names}
    missing = sorted({START, *ENDS.values()} - found.keys())
    if missing:
        raise UnknownGraph(f"{name} has no step {missing[0]}")
    pixels = opset13.parameter(openvino.PartialShape([-1, SIDE, SIDE, 3]), openvino.Type.u8)
    pixels.output(0).set_names({"PIXELS"})
    factors = found[START].node.input_values()
    resized = next(each for each in factors if each.node.get_type_name() != "Constant")
    planes = opset13.transpose(opset13.convert(pixels, "f32"), opset13.constant([0, 3, 1, 2]))
    for old, new in ((resized, planes), (graph.input(0), pixels)):
        for consumer in old.get_target_inputs():
            consumer.replace_source_output(new.output(0))
    results = [_result(opset13, name, found[source]) for name, source in ENDS.items()]
    return openvino.Model(results, [pixels], "ssd-mobilenet-v2")


def _result(opset: Any, name: str, source: Any) -> Any:
    source.set_names({name})
    return opset.result(source)
