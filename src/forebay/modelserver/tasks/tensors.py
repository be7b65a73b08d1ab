"""Conversion between task tensors and Python values."""

from collections.abc import Iterable

import numpy as np

from forebay.core.serving.config import Datatype
from forebay.core.serving.values import Tensor
from forebay.engines.tensor.arrays import DTYPES
from forebay.engines.tensor.protocol import Array
from forebay.modelserver.tasks.contract import ContractViolation
from forebay.wire.oip.tensors import prefixed, split


def strings(name: str, values: Iterable[str | bytes], shape: tuple[int, ...]) -> Tensor:
    """A BYTES tensor of texts or binary values."""
    data = b"".join([prefixed(each.encode() if isinstance(each, str) else each) for each in values])
    return Tensor(name, Datatype.BYTES, shape, data)


def numbers(name: str, datatype: Datatype, array: Array) -> Tensor:
    """A tensor from an array; its elements are converted if necessary."""
    return Tensor(name, datatype, array.shape, np.ascontiguousarray(array, DTYPES[datatype]).tobytes())


def as_array(tensor: Tensor) -> Array:
    """A view of a numeric tensor. Raises `ContractViolation` if some elements are not finite."""
    array = np.frombuffer(tensor.data, DTYPES[tensor.datatype]).reshape(tensor.shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ContractViolation(f"it gave '{tensor.name}' with numbers that are not finite")
    return array


def as_bytes(tensor: Tensor) -> list[bytes]:
    """Elements of a BYTES tensor, flat. Raises `ValueError` if it is malformed."""
    return [bytes(each) for each in split(tensor.data)]


def as_texts(tensor: Tensor) -> list[str]:
    """Elements of a BYTES tensor as texts. Raises `ValueError` if malformed, `ContractViolation` if not UTF-8."""
    try:
        return [str(each, "utf-8") for each in split(tensor.data)]
    except UnicodeDecodeError:
        raise ContractViolation(f"it gave '{tensor.name}' with bytes that are not UTF-8") from None


def token_count(tensors: Iterable[Tensor]) -> int:
    """Total number of tokens; 0 for a model that does not count them."""
    return sum(int(as_array(each).sum()) for each in tensors)
