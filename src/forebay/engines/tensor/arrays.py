"""The protocol's element types in numpy, and concatenation of adjacent arrays."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from forebay.core.serving.config import VARIABLE, Datatype, ModelConfig, TensorSpec
from forebay.engines.tensor.protocol import Array, BadInput

DTYPES: Final[dict[Datatype, "np.dtype[Any]"]] = {
    Datatype.BOOL: np.dtype(np.bool_),
    Datatype.UINT8: np.dtype(np.uint8),
    Datatype.UINT16: np.dtype("<u2"),
    Datatype.UINT32: np.dtype("<u4"),
    Datatype.UINT64: np.dtype("<u8"),
    Datatype.INT8: np.dtype(np.int8),
    Datatype.INT16: np.dtype("<i2"),
    Datatype.INT32: np.dtype("<i4"),
    Datatype.INT64: np.dtype("<i8"),
    Datatype.FP16: np.dtype("<f2"),
    Datatype.FP32: np.dtype("<f4"),
    Datatype.FP64: np.dtype("<f8"),
    Datatype.BYTES: np.dtype(object),
    Datatype.BF16: np.dtype("<u2"),
}
"""BF16 is represented by its 16 bits: numpy has no such type."""

DATATYPES: Final = {dtype: datatype for datatype, dtype in DTYPES.items() if datatype is not Datatype.BF16}
"""The inverse; `uint16` maps to UINT16."""


def datatype_of(array: Array) -> Datatype | None:
    """The protocol's datatype of an array's elements; None: it has no such type."""
    found = DATATYPES.get(array.dtype)
    if found is None and array.dtype.kind in "SU":
        return Datatype.BYTES
    return found or DATATYPES.get(array.dtype.newbyteorder("<"))


def plain(array: Array) -> Array:
    """The same values, little-endian and C-contiguous; fixed-length strings become `bytes` objects."""
    dtype = array.dtype
    if dtype.kind in "SUO":
        return as_bytes(array)
    if dtype.byteorder != ">" and array.flags.c_contiguous:
        return array
    dtype = dtype.newbyteorder("<")
    return np.ascontiguousarray(array, dtype).reshape(array.shape)  # else a scalar would gain a dimension


def as_bytes(array: Array) -> Array:
    """An array of strings, or of anything with a string form, as an array of `bytes`."""
    flat = [each if type(each) is bytes else str(each).encode() for each in array.ravel().tolist()]
    shown = np.empty(len(flat), object)
    shown[:] = flat
    return shown.reshape(array.shape)


def as_text(array: Array, name: str) -> Array:
    """An array of `bytes` with `str` as its elements. Raises `BadInput` if they are not UTF-8."""
    text = np.empty(array.size, object)
    try:
        text[:] = [each.decode() if type(each) is bytes else each for each in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise BadInput(f"input '{name}' holds bytes that are not UTF-8, which this model needs: {error}") from None
    return text.reshape(array.shape)


def states_of(config: ModelConfig) -> dict[str, TensorSpec]:
    """The states that a model makes for the next request of a sequence, by name."""
    states = config.sequences.states if config.sequences else ()
    return {state.output: TensorSpec(state.output, state.datatype, state.dims) for state in states}


def made_by(config: ModelConfig) -> dict[str, TensorSpec]:
    """What a model makes, by name: its outputs, and the states of its sequences."""
    outputs = {spec.name: spec for spec in config.outputs}
    return outputs | states_of(config) | outputs  # an output that is a state as well has the output's dims


def check_states(states: Mapping[str, TensorSpec], arrays: Mapping[str, Array], config: ModelConfig) -> None:
    """Raises `ValueError` if a state contradicts the configuration: the model would get it with the next request."""
    for name, spec in states.items():
        problem = mismatch(spec, arrays[name], config.name, config.max_batch > 0) if name in arrays else ""
        if problem:
            raise ValueError(problem)


def mismatch(spec: TensorSpec, array: Array, model: str, batches: bool) -> str:
    """Why `array` contradicts the configuration of its output; empty: it does not."""
    dims = spec.dims if spec.reshape is None else spec.reshape
    shape = array.shape[1:] if batches else array.shape
    short = batches and not array.ndim
    if array.dtype == DTYPES[spec.datatype] and not short and _fits(shape, dims):
        return ""
    found = datatype_of(array) or array.dtype
    expected = (VARIABLE, *dims) if batches else dims
    return (
        f"model '{model}' gave output '{spec.name}' as {found} {list(array.shape)}; "
        f"its configuration says {spec.datatype} {list(expected)}"
    )


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    if len(shape) != len(dims):
        return False
    for have, want in zip(shape, dims, strict=True):  # noqa: SIM110 - a generator takes three times as long
        if want not in (have, VARIABLE):
            return False
    return True


VIEWED_BYTES_MIN: Final = 1 << 16
"""Copying smaller arrays is faster than checking whether a view is possible."""


def joined(parts: Sequence[Array]) -> Array:
    """Concatenate arrays along the first dimension; without a copy if they are adjacent in one buffer."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.nbytes * len(parts) >= VIEWED_BYTES_MIN and not first.dtype.hasobject and _adjacent(parts):
        rows = sum(len(part) for part in parts)
        return as_strided(first, (rows, *first.shape[1:]), first.strides, subok=False)
    return np.concatenate(parts)


def _adjacent(parts: Sequence[Array]) -> bool:
    owner = _owner(parts[0])
    end = -1
    for part in parts:
        start: int = part.__array_interface__["data"][0]
        if not part.nbytes or not part.flags.c_contiguous or end not in (-1, start) or _owner(part) is not owner:
            return False
        end = start + part.nbytes
    return True


def _owner(array: Array) -> object:
    """The object that owns an array's memory: the same for all views of one buffer."""
    found: object = array
    while isinstance(found, np.ndarray) and found.base is not None:
        found = found.base
    return found.obj if isinstance(found, memoryview) else found
