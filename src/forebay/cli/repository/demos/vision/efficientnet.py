"""EfficientNet-lite0 as an ONNX model, from the weights of its PyTorch port.

The network is that of the paper "EfficientNet" (arXiv 1905.11946) in the variant of the TensorFlow project
(`tpu/models/official/efficientnet/lite`): no squeeze-and-excitation, ReLU6 everywhere. Batch normalisation is folded
into the preceding convolutions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.cli.repository.demos.vision.weights import read_weights
from forebay.engines.tensor.protocol import Array

SIDE: Final = 224
"""Width and height of its input in pixels."""
STAGES: Final = (
    (1, 3, 1, 1),
    (2, 3, 2, 6),
    (2, 5, 2, 6),
    (3, 3, 2, 6),
    (3, 5, 1, 6),
    (4, 5, 2, 6),
    (1, 3, 1, 6),
)
"""Stages: number of blocks, kernel size, stride of the first block, expansion ratio."""
EPSILON: Final = 1e-3
"""Epsilon of the batch normalisation."""
OPSET: Final = 13
IR_VERSION: Final = 8
INPUT: Final = "PIXELS"
OUTPUT: Final = "SCORE"


def make(target: Path, parts: Sequence[Path]) -> None:
    """Write the model. Input: `PIXELS`, FP32 [n, 3, 224, 224]; output: `SCORE`, FP32 [n, 1000], probabilities."""
    import onnx

    network = _Network(read_weights(parts[0]))
    network.convolve("_conv_stem", "_bn0", kernel=3, stride=2)
    block = 0
    for count, kernel, stride, widening in STAGES:
        for place in range(count):
            network.block(f"_blocks.{block}", kernel, stride if place == 0 else 1, widening)
            block += 1
    network.convolve("_conv_head", "_bn1")
    network.classify()
    network.graph.input.append(_value(INPUT, 3, SIDE, SIDE))
    network.graph.output.append(_value(OUTPUT, network.classes))
    model = onnx.helper.make_model(
        network.graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    onnx.checker.check_model(model)
    onnx.save(model, str(target))


class _Network:
    """A graph to which nodes are appended."""

    def __init__(self, weights: dict[str, Array]) -> None:
        import onnx

        self.graph = onnx.GraphProto(name="efficientnet-lite0")
        self.classes = len(weights["_fc.bias"])
        self._weights = weights
        self._end = INPUT
        """The name of the last output."""

    def convolve(
        self, name: str, norm: str, *, kernel: int = 1, stride: int = 1, groups: int = 1, bends: bool = True
    ) -> None:
        """A convolution with batch normalisation, and ReLU6 if `bends`; padded as TensorFlow pads even sizes."""
        weight = self._weights[f"{name}.weight"]
        scale = self._weights[f"{norm}.weight"] / np.sqrt(self._weights[f"{norm}.running_var"] + EPSILON)
        bias = self._weights[f"{norm}.bias"] - self._weights[f"{norm}.running_mean"] * scale
        before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
        self._constant(f"{name}.weight", weight * scale.reshape(-1, 1, 1, 1))
        self._constant(f"{name}.bias", bias)
        self._add(
            "Conv",
            name,
            [f"{name}.weight", f"{name}.bias"],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=groups,
        )
        if bends:
            self._constant("zero", np.zeros((), np.float32))
            self._constant("six", np.full((), 6, np.float32))
            self._add("Clip", f"{name}.relu6", ["zero", "six"])

    def block(self, name: str, kernel: int, stride: int, widening: int) -> None:
        """An inverted bottleneck: expand, depthwise, project; with a skip connection if input and output shapes
        match."""
        start = self._end
        depthwise = f"{name}._depthwise_conv"
        channels = len(self._weights[f"{depthwise}.weight"])
        narrow = len(self._weights[f"{name}._project_conv.weight"])
        if widening != 1:
            self.convolve(f"{name}._expand_conv", f"{name}._bn0")
        self.convolve(depthwise, f"{name}._bn1", kernel=kernel, stride=stride, groups=channels)
        self.convolve(f"{name}._project_conv", f"{name}._bn2", bends=False)
        if stride == 1 and channels == narrow * widening:
            self._add("Add", f"{name}.sum", [start])

    def classify(self) -> None:
        """Global average pooling, then the class probabilities."""
        self._add("GlobalAveragePool", "pool", [])
        self._add("Flatten", "flat", [])
        self._constant("fc.weight", self._weights["_fc.weight"])
        self._constant("fc.bias", self._weights["_fc.bias"])
        self._add("Gemm", "fc", ["fc.weight", "fc.bias"], transB=1)
        self._add("Softmax", OUTPUT, [], axis=1)

    def _add(self, kind: str, output: str, more: list[str], **attributes: Any) -> None:
        import onnx

        self.graph.node.append(onnx.helper.make_node(kind, [self._end, *more], [output], output, **attributes))
        self._end = output

    def _constant(self, name: str, array: Array) -> None:
        import onnx

        if all(each.name != name for each in self.graph.initializer):
            found = np.ascontiguousarray(array, np.float32)
            self.graph.initializer.append(onnx.numpy_helper.from_array(found, name))


def _value(name: str, *shape: int) -> Any:
    import onnx

    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", *shape])
