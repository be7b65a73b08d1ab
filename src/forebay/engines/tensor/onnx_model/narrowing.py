"""Models that read a single position of a sequence compute it alone, from where positions last look at each other.

Classifiers, rerankers and embedders of BERT's kind go on with the first token of the last layer: a `Gather` along
the sequence. Behind the last attention no position depends on another, so that projection, residuals, norms and
feed-forward layers need to run for this one only: of a model with twelve layers, a twentieth of all work. ONNX
Runtime leaves that as it is. Here the `Gather` moves up to the last tensors in which positions are mixed.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper, shape_inference

FILE_BYTES_MAX: Final = 1 << 30
"""Larger models stay as they are: a model is in memory twice while it is rewritten."""
WEIGHTS_BYTES_MIN: Final = 1024
UNARY: Final = frozenset({
    "Abs", "Cast", "Elu", "Erf", "Exp", "Gelu", "Identity", "LeakyRelu", "Log", "Neg", "Reciprocal", "Relu",
    "Sigmoid", "Softplus", "Sqrt", "Tanh",
})  # fmt: skip
BINARY: Final = frozenset({"Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"})
PRODUCTS: Final = frozenset({"MatMul", "MatMulInteger"})
STANDARD: Final = frozenset({"", "ai.onnx"})

_Needs = list[tuple[int, int]]
"""Inputs of a node that have the sequence, by number, with its axis."""


def narrowed(file: Path) -> bytes | None:
    """The model without work that nobody needs; None: there is none, or the file is too large, or not understood."""
    if file.stat().st_size > FILE_BYTES_MAX:
        return None
    try:
        model = onnx.load(file, load_external_data=False)
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
            return None
        return model.SerializeToString() if narrow(model) else None
    except (DecodeError, shape_inference.InferenceError, IndexError, TypeError, ValueError):
        return None  # ONNX Runtime says what is wrong with it


def narrow(model: onnx.ModelProto) -> bool:
    """Rewrite the model. False: nothing has changed."""
    if any(attribute.HasField("g") or attribute.graphs for node in model.graph.node for attribute in node.attribute):
        return False  # inner graphs use tensors of this one without saying so
    if not any(node.op_type == "Gather" for node in model.graph.node):
        return False
    return _Graph(model).narrow()


class _Graph:
    """A graph's tensors: who makes and who uses them, and their shapes as far as they are known."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = self._graph = model.graph
        self._nodes = list(graph.node)
        self._outputs = {each.name for each in graph.output}
        self._constants = {each.name: each for each in graph.initializer}
        self._makers: dict[str, int] = {}
        self._users: dict[str, set[int]] = defaultdict(set)
        for number, node in enumerate(self._nodes):
            for name in node.output:
                self._makers[name] = number
            for name in node.input:
                self._users[name].add(number)
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self._constants[node.output[0]] = node.attribute[0].t
        self._shapes = _shapes(model) | {name: list(each.dims) for name, each in self._constants.items()}

    def narrow(self) -> bool:
        """Move the first `Gather` up behind which there is work to save. False: there is none."""
        return any(node.op_type == "Gather" and self._narrow(at, node) for at, node in enumerate(self._nodes))

    def _narrow(self, number: int, gather: onnx.NodeProto) -> bool:
        data, chosen = gather.input
        index, shape = self._constants.get(chosen), self._shapes.get(data)
        if index is None or index.dims or shape is None or data not in self._makers:
            return False
        axis, at = _number(gather, "axis", 0), int(numpy_helper.to_array(index))
        axis += len(shape) if axis < 0 else 0
        if at not in (0, -1) or axis == len(shape) - 1:
            return False
        region = self._region(data, axis, number)
        if not any(self._nodes[each].op_type in PRODUCTS for each in region):
            return False
        self._rewrite(region, at)
        return True  # the `Gather` itself stays: of one position, the first and the last are the same

    def _region(self, data: str, axis: int, gather: int) -> dict[int, _Needs]:
        """The nodes that need to run for one position only, with the inputs that have positions."""
        region: dict[int, _Needs] = {}
        found: dict[int, int] = {}
        twice: set[int] = set()
        pending = [(data, axis)]
        while pending:
            name, along = pending.pop()
            maker = self._makers.get(name)
            if maker is None or found.get(maker) == along:
                continue
            if maker in found:  # as one axis and as another
                twice.add(maker)
                continue
            node, found[maker] = self._nodes[maker], along
            needs = self._through(node, along) if name == node.output[0] else []
            if needs:
                region[maker] = needs
                pending += [(node.input[number], axis) for number, axis in needs]
        for number in twice:
            region.pop(number, None)
        while wide := [number for number in region if self._is_wide(number, region, gather)]:
            for number in wide:
                del region[number]
        return region

    def _is_wide(self, number: int, region: dict[int, _Needs], gather: int) -> bool:
        """Whether someone reads all positions of a node's output, or what else it finds from all of them."""
        first, *others = self._nodes[number].output
        if first in self._outputs:
            return True
        for user in self._users[first]:
            needs = region.get(user, ())
            places = [place for place, name in enumerate(self._nodes[user].input) if name == first]
            if user != gather and not set(places) <= {place for place, _ in needs}:
                return True
        return any(not self._ends_in(name, region) for name in others if name)

    def _ends_in(self, name: str, region: dict[int, _Needs]) -> bool:
        """Whether a tensor, and all that is computed from it, is used by these nodes only."""
        pending, seen = [name], {name}
        while pending:
            name = pending.pop()
            if name in self._outputs:
                return False
            for user in self._users[name]:
                if user not in region:
                    more = set(self._nodes[user].output) - seen
                    seen |= more
                    pending += more
        return True

    def _through(self, node: onnx.NodeProto, axis: int) -> _Needs:
        """Inputs that must have one position for the output to have one; empty: it needs all positions."""
        kind, given = node.op_type, node.input
        if node.domain not in STANDARD:
            return []
        if kind in BINARY:
            return self._operands(node, axis)
        single = [(0, axis)]
        if kind in UNARY:
            return single
        if kind in PRODUCTS:
            weights = self._shapes.get(given[1]) if given[1] in self._constants else None
            rank = self._rank(given[0])
            flat = all(self._is_single(name) for name in given[2:3])
            return single if weights and len(weights) == 2 and rank and axis < rank - 1 and flat else []
        if kind == "LayerNormalization":
            over = self._axis(_number(node, "axis", -1), given[0])
            return single if over is not None and over > axis else []
        if kind == "ReduceMean":
            return single if _number(node, "keepdims", 1) and self._over_later(node, axis) else []
        if kind == "DynamicQuantizeLinear":
            return single
        if kind in ("QuantizeLinear", "DequantizeLinear"):
            return single if all(self._is_single(name) for name in given[1:]) else []
        return []

    def _operands(self, node: onnx.NodeProto, axis: int) -> _Needs:
        """Of an operation that broadcasts."""
        rank = self._rank(node.output[0])
        if rank is None:
            return []
        needs = []
        for number, name in enumerate(node.input):
            shape = self._shapes.get(name)
            if shape is None:
                return []
            own = axis - (rank - len(shape))
            if own >= 0 and shape[own] != 1:
                needs.append((number, own))
        return needs

    def _over_later(self, node: onnx.NodeProto, axis: int) -> bool:
        """Whether a mean is taken over axes behind this one."""
        axes = next((list(each.ints) for each in node.attribute if each.name == "axes"), None)
        if axes is None and len(node.input) > 1 and node.input[1] in self._constants:
            axes = numpy_helper.to_array(self._constants[node.input[1]]).tolist()
        found = [self._axis(each, node.input[0]) for each in axes or ()]
        return bool(found) and all(each is not None and each > axis for each in found)

    def _is_single(self, name: str) -> bool:
        """Whether it is one number."""
        shape = self._shapes.get(name)
        return not name or (shape is not None and all(size == 1 for size in shape))

    def _rank(self, name: str) -> int | None:
        shape = self._shapes.get(name)
        return None if shape is None else len(shape)

    def _axis(self, axis: int, name: str) -> int | None:
        rank = self._rank(name)
        return None if rank is None else axis + rank if axis < 0 else axis

    def _rewrite(self, region: dict[int, _Needs], at: int) -> None:
        """Choose the position where the region begins."""
        nodes, behind = self._nodes, defaultdict(list)
        chosen: dict[tuple[str, int], str] = {}
        for number, needs in region.items():
            node = nodes[number]
            for place, axis in needs:
                name = node.input[place]
                maker = self._makers.get(name, -1)
                if maker in region:
                    continue
                if (name, axis) not in chosen:
                    chosen[name, axis] = self._name()
                    made = helper.make_node("Gather", [name, self._index(at)], [chosen[name, axis]], axis=axis)
                    behind[maker].append(made)
                node.input[place] = chosen[name, axis]
        smaller = {name for number in region for name in nodes[number].output}
        kept = [each for each in self._graph.value_info if each.name not in smaller]
        del self._graph.node[:], self._graph.value_info[:]
        self._graph.value_info.extend(kept)
        self._graph.node.extend(behind[-1])
        for number, node in enumerate(nodes):
            self._graph.node.extend([node, *behind[number]])

    def _index(self, value: int) -> str:
        name = self._name()
        self._graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, (1,), [value]))
        self._constants[name] = self._graph.initializer[-1]
        return name

    def _name(self) -> str:
        """One that no tensor has."""
        number = 0
        while (name := f"forebay_{number}") in self._users or name in self._makers or name in self._constants:
            number += 1
        self._users[name] = set()
        return name


def _number(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(each.i) for each in node.attribute if each.name == name), default)


def _shapes(model: onnx.ModelProto) -> dict[str, list[Any]]:
    """Of tensors whose number of axes is known. A size is a number, or None."""
    weights = [each for each in model.graph.initializer if len(each.raw_data) > WEIGHTS_BYTES_MIN]
    kept = [each.raw_data for each in weights]
    for each in weights:
        each.ClearField("raw_data")  # the inference would copy it twice, and reads only the dimensions
    try:
        inferred = shape_inference.infer_shapes(model)
    finally:
        for each, data in zip(weights, kept, strict=True):
            each.raw_data = data
    shapes = dict(_known(inferred.graph))
    # of a size that is computed, the inference does not even say how many axes it has
    for node in inferred.graph.node:
        if node.op_type != "Reshape" or node.output[0] in shapes:
            continue
        sizes = shapes.get(node.input[1], [None])
        if None not in sizes:
            kind = onnx.TensorProto.UNDEFINED
            axes = [None] * sizes[0]
            inferred.graph.value_info.append(helper.make_tensor_value_info(node.output[0], kind, axes))
    return dict(_known(shape_inference.infer_shapes(inferred).graph))


def _known(graph: onnx.GraphProto) -> Iterator[tuple[str, list[Any]]]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        if kind.HasField("shape"):
            yield value.name, [each.dim_value if each.HasField("dim_value") else None for each in kind.shape.dim]
