"""Validation of requests against the model: names, types, shapes and sizes. The texts are Triton's.

A `Contract` is built once per loaded model version; `check` runs for every request.
"""

from collections.abc import Hashable, Sequence
from math import prod
from struct import Struct
from typing import Final

from forebay.core.serving.config import ELEMENT_BYTES, VARIABLE, Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Buffer, InferRequest, Tensor

LENGTH: Final = Struct("<I")
"""Length prefix of each BYTES element."""
STRINGS_MAX: Final = 1_000_000
"""Element limit of one BYTES tensor: validation takes 0.2 µs each, and blocks the event loop."""
ELEMENTS_MAX: Final = (2**63 - 1) // 8
"""Elements of an array of 64-bit numbers or of texts, if dimensions of 0 are left out."""
BATCH_NOTE: Final = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
"""Clients match this text of Triton's core."""


class Checked:
    """A validated request, in the form that the model takes."""

    __slots__ = ("inputs", "outputs", "rows", "shape", "size_bytes")

    def __init__(
        self, rows: int, shape: Hashable, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], size_bytes: int
    ) -> None:
        self.rows = rows
        """Rows that it adds to a batch; 1 if the model does not batch."""
        self.shape = shape
        """Only requests with equal values may share a batch."""
        self.inputs = inputs
        """Shaped as the backend expects."""
        self.outputs = outputs
        """Requested outputs in the model's order; empty: all."""
        self.size_bytes = size_bytes
        """Of the inputs."""


class _Fixed:
    """An input of one shape, of elements of one size."""

    __slots__ = ("datatype", "dims", "item_bytes")

    def __init__(self, spec: TensorSpec) -> None:
        self.datatype = spec.datatype
        self.dims = spec.dims
        self.item_bytes = prod(spec.dims) * ELEMENT_BYTES[spec.datatype]
        """Size of a row; without batches, of the tensor."""


class Contract:
    """What the configuration of a model requires of its requests."""

    def __init__(self, config: ModelConfig, strings_max: int = STRINGS_MAX) -> None:
        self._model = config.name
        self._strings_max = strings_max
        self._max_batch = config.max_batch
        self._inputs = {spec.name: spec for spec in config.inputs}
        self._outputs = {spec.name: spec for spec in config.outputs}
        self._required = sum(not spec.optional for spec in config.inputs)
        self._has_optional = self._required < len(config.inputs)
        self._varying = tuple(
            spec.name
            for spec in config.inputs
            if config.max_batch and not spec.allow_ragged and VARIABLE in spec.dims
        )
        self._plain = not any(spec.reshape is not None for spec in config.inputs)
        self._fixed = {
            spec.name: _Fixed(spec)
            for spec in config.inputs
            if not (spec.optional or spec.datatype is Datatype.BYTES or VARIABLE in spec.dims or 0 in spec.dims)
        }
        self._all_fixed = self._plain and 0 < len(config.inputs) == len(self._fixed)

    def check(self, request: InferRequest) -> Checked:
        """Validate a request. Raises `Refused` (INVALID_ARGUMENT)."""
        wanted = self._wanted(request) if request.outputs else ()
        if self._all_fixed:
            checked = self._checked(request, wanted)
            if checked is not None:
                return checked
        given = request.inputs[::-1]  # Triton mostly reports the last of several invalid inputs
        if not self._required <= len(given) <= len(self._inputs):
            raise self._invalid(request, self._number_text(request.inputs))
        rows = 1
        if self._max_batch:
            rows = self._rows(request)
        by_name: dict[str, Tensor] = {}
        for tensor in given:
            spec = self._spec(tensor.name)
            self._check_shape(request, tensor, spec)
            self._check_size(request, tensor, tensor.shape if rows else tensor.shape[1:])
            if not rows and size_bytes(tensor.data):
                # Triton expects one row here, but no model's process could read it
                raise self._invalid(request, self._size_text(tensor.name, 0, size_bytes(tensor.data)))
            by_name[tensor.name] = tensor if spec.reshape is None else self._reshaped(tensor, spec)
        if len(by_name) < len(given):
            raise self._invalid(request, f"input given more than once for model '{self._model}'")
        if len(given) < len(self._inputs) and any(
            name not in by_name for name, spec in self._inputs.items() if not spec.optional
        ):
            raise self._invalid(request, self._number_text(request.inputs))
        shape: Hashable = ()
        if self._varying:
            shape = tuple(by_name[name].shape[1:] for name in self._varying if name in by_name)
        if self._has_optional:
            shape = (shape, *(name for name in self._inputs if name in by_name))
        size = sum([size_bytes(tensor.data) for tensor in given])
        inputs = request.inputs if self._plain else tuple(by_name.values())
        return Checked(max(1, rows), shape, inputs, wanted, size)

    def _checked(self, request: InferRequest, wanted: tuple[str, ...]) -> Checked | None:
        """The request if it is valid and all inputs are fixed; None: what is wrong with it remains to be seen."""
        inputs = request.inputs
        count = len(inputs)
        if count != len(self._fixed) or (count > 1 and len({tensor.name for tensor in inputs}) < count):
            return None
        rows = 0 if self._max_batch else 1
        size = 0
        for tensor in inputs:
            fixed = self._fixed.get(tensor.name)
            if fixed is None or tensor.datatype != fixed.datatype:
                return None
            shape = tensor.shape
            if self._max_batch:
                if not shape or shape[1:] != fixed.dims or not 0 < shape[0] <= self._max_batch:
                    return None
                if rows and shape[0] != rows:
                    return None
                rows = shape[0]
            elif shape != fixed.dims:
                return None
            found = size_bytes(tensor.data)
            if found != rows * fixed.item_bytes:
                return None
            size += found
        return Checked(rows, (), inputs, wanted, size)

    def _wanted(self, request: InferRequest) -> tuple[str, ...]:
        """The requested outputs, in the model's order."""
        asked = set(request.outputs)
        for name in request.outputs:
            if name not in self._outputs:
                # without the request id, as in Triton
                text = f"unexpected inference output '{name}' for model '{self._model}'"
                raise Refused(Kind.INVALID_ARGUMENT, text)
        return tuple(name for name in self._outputs if name in asked)

    def _spec(self, name: str) -> TensorSpec:
        spec = self._inputs.get(name)
        if spec is None:
            raise Refused(Kind.INVALID_ARGUMENT, f"unexpected inference input '{name}' for model '{self._model}'")
        return spec

    def _rows(self, request: InferRequest) -> int:
        """The batch size, which must be the same for all inputs."""
        rows: int | None = None
        for tensor in request.inputs[::-1]:
            self._spec(tensor.name)
            if not tensor.shape:
                text = f"input '{tensor.name}' has no shape but model requires batch dimension for '{self._model}'"
                raise self._invalid(request, text)
            if rows is None:
                rows = tensor.shape[0]
            elif tensor.shape[0] != rows:
                text = f"input '{tensor.name}' batch size does not match other inputs for '{self._model}'"
                raise self._invalid(request, text)
        if rows is None:
            return 1
        if not 0 <= rows <= self._max_batch:
            text = f"inference request batch-size must be <= {self._max_batch} for '{self._model}'"
            raise self._invalid(request, text)
        return rows

    def _check_shape(self, request: InferRequest, tensor: Tensor, spec: TensorSpec) -> None:
        if tensor.datatype != spec.datatype:
            text = (
                f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{self._model}' "
                f"expects '{spec.datatype}'"
            )
            raise self._invalid(request, text)
        shape = tensor.shape[1:] if self._max_batch else tensor.shape
        if shape == spec.dims and VARIABLE not in shape:
            return
        fits = len(shape) == len(spec.dims)
        if fits and min(shape, default=0) < 0:
            text = (
                f"All input dimensions should be specified for input '{tensor.name}' for model '{self._model}', "
                f"got {dims_text(tensor.shape)}"
            )
            raise self._invalid(request, text)
        if not fits or any(want not in (VARIABLE, have) for want, have in zip(spec.dims, shape, strict=True)):
            full = (VARIABLE, *spec.dims) if self._max_batch else spec.dims
            text = (
                f"unexpected shape for input '{tensor.name}' for model '{self._model}'. Expected {dims_text(full)}, "
                f"got {dims_text(tensor.shape)}. {BATCH_NOTE if self._max_batch else ''}"
            )
            raise self._invalid(request, text)

    def _check_size(self, request: InferRequest, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Check the size of the data against the shape."""
        elements = prod(shape)
        if not elements and self._exceeds(tensor.shape):
            text = (
                f"input '{tensor.name}' for model '{self._model}': shape {dims_text(tensor.shape)} causes total "
                f"element count to exceed maximum size of {ELEMENTS_MAX}"
            )
            raise self._invalid(request, text)
        if tensor.datatype is Datatype.BYTES:
            if elements > self._strings_max:
                text = (
                    f"input '{tensor.name}' for model '{self._model}' has {elements} string elements, more than the "
                    f"{self._strings_max} that --max-string-elements allows"
                )
                raise self._invalid(request, text)
            problem = bytes_problem(tensor.data, elements, tensor.name, self._model)
            if problem:
                raise self._invalid(request, problem)
            return
        expected, found = elements * ELEMENT_BYTES[tensor.datatype], size_bytes(tensor.data)
        if expected != found:
            raise self._invalid(request, self._size_text(tensor.name, expected, found))

    def _exceeds(self, shape: tuple[int, ...]) -> bool:
        """Whether no array can have this shape, or a batch of it: dimensions beside a zero have limits too."""
        item = shape[1:] if self._max_batch else shape
        return prod([size or 1 for size in item]) * max(1, self._max_batch) > ELEMENTS_MAX

    def _size_text(self, name: str, expected: int, found: int) -> str:
        what = f"input byte size mismatch for input '{name}' for model '{self._model}'"
        return f"{what}. Expected {expected}, got {found}"

    def _reshaped(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        lead = 1 if self._max_batch else 0
        assert spec.reshape is not None
        return tensor.shaped(tensor.shape[:lead] + refilled(tensor.shape[lead:], spec.dims, spec.reshape))

    def _number_text(self, given: Sequence[Tensor]) -> str:
        names = {tensor.name for tensor in given}
        missing = ",".join(
            f"'{name}'" for name, spec in self._inputs.items() if not spec.optional and name not in names
        )
        got = ",".join(f"'{tensor.name}'" for tensor in given)
        count = f"{len(self._inputs)} inputs"
        if self._has_optional:
            count = f"number of inputs between {self._required} and {len(self._inputs)}"
        return (
            f"expected {count} but got {len(given)} inputs for model '{self._model}'. Got input(s) [{got}], but "
            f"missing required input(s) {f'[{missing}]' if missing else ']'}. Please provide all required input(s)."
        )

    def _invalid(self, request: InferRequest, text: str) -> Refused:
        return Refused(Kind.INVALID_ARGUMENT, prefix(request.id) + text)


def prefix(id: str) -> str:
    """Prefix of Triton's error texts about a request."""
    return f"[request id: {id or '<id_unknown>'}] "


def dims_text(shape: Sequence[int]) -> str:
    """A shape as Triton formats it."""
    return f"[{','.join(map(str, shape))}]"


def size_bytes(data: Buffer) -> int:
    """Size of the data in bytes."""
    return data.nbytes if type(data) is memoryview else len(data)


def refilled(shape: Sequence[int], dims: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """`other` with its variable dimensions filled, in order, from the dimensions of `shape` that vary in `dims`."""
    values = iter([have for want, have in zip(dims, shape, strict=True) if want == VARIABLE])
    return tuple(next(values) if size == VARIABLE else size for size in other)


def bytes_problem(data: Buffer, elements: int, name: str, model: str) -> str:
    """Why the data of a BYTES tensor with that number of elements is invalid; empty: it is valid."""
    at, found, end = 0, 0, size_bytes(data)
    length_bytes, unpack_from = LENGTH.size, LENGTH.unpack_from
    last = end - length_bytes
    while at <= last and found < elements:
        at += length_bytes + unpack_from(data, at)[0]
        found += 1
    if at == end and found == elements:
        return ""
    if at > end:
        return f"incomplete string data for inference input '{name}' for model '{model}'"
    if at == end:
        return f"expected {elements} string elements for inference input '{name}' for model '{model}', got {found}"
    if at > last:
        return (
            f"incomplete string length indicator for inference input '{name}' for model '{model}', expecting "
            f"{length_bytes} bytes but only {end - at} bytes available. Please make sure the string length "
            f"indicator is in one buffer."
        )
    return (
        f"unexpected number of string elements {found + 1} for inference input '{name}' for model '{model}', "
        f"expecting {elements}"
    )
