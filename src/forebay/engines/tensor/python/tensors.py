"""Tensors in the Python model API, and names of element types."""

from collections.abc import Mapping
from operator import index
from struct import unpack_from
from typing import Any, Final, Protocol, SupportsIndex, cast, runtime_checkable

import numpy as np

from forebay.core.serving.config import Datatype
from forebay.engines.tensor.arrays import as_bytes, datatype_of, plain
from forebay.engines.tensor.protocol import Array


class TritonModelException(Exception):  # noqa: N818 - the name that models catch
    """The model has misused the API, or reports an error."""


def as_text(value: object, what: str) -> str:
    """Text that can be encoded, from what Triton takes as text: also `bytes`, and subclasses such as `numpy.str_`."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value)}")
    return value if type(value) is str and value.isascii() else value.encode("utf-8", "replace").decode()


def as_integer(value: object, what: str) -> int:
    """An integer that can be encoded, from what Triton takes as one: also numpy's."""
    try:
        found = index(cast(SupportsIndex, value))
    except TypeError:
        raise TypeError(f"{what} must be an int, not {type(value)}") from None
    if not -(2**63) <= found < 2**64:
        raise TypeError(f"{what} must be an int of 64 bits, not {found}")
    return found


NUMBERS: Final = {
    name: number
    for number, name in enumerate(
        ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"), 1
    )
} | {"BYTES": 13, "BF16": 14}
"""`TRITONSERVER_DataType` of Triton's C API."""

_NUMPY: Final[dict[int, type]] = {
    1: np.bool_, 2: np.uint8, 3: np.uint16, 4: np.uint32, 5: np.uint64,
    6: np.int8, 7: np.int16, 8: np.int32, 9: np.int64,
    10: np.float16, 11: np.float32, 12: np.float64, 13: np.object_,
}  # fmt: skip

TRITON_STRING_TO_NUMPY: Final[Mapping[str, type]] = {
    f"TYPE_{'STRING' if name == 'BYTES' else name}": bool if name == "BOOL" else _NUMPY[number]
    for name, number in NUMBERS.items()
    if number in _NUMPY
}
"""By the names in `config.pbtxt`."""


def triton_string_to_numpy(triton_type_string: str) -> type:
    """The numpy type for a type in `config.pbtxt`. Raises `KeyError` for one that numpy does not have."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type | None:
    """The numpy type for a number of Triton's C API."""
    return _NUMPY.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number of a numpy type in Triton's C API."""
    wanted = np.dtype(data_type)
    if wanted.kind == "S":
        return NUMBERS["BYTES"]
    return next((number for number, each in _NUMPY.items() if wanted == np.dtype(each)), None)


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()]:
    """The concatenated elements, each with a length prefix of 4 bytes, little-endian."""
    if not input_tensor.size:
        return ()
    parts = as_bytes(input_tensor).ravel().tolist()
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(4, "little"), part))


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The inverse of `serialize_byte_tensor`, as a one-dimensional array. Raises `struct.error` if truncated."""
    found: list[bytes] = []
    at = 0
    while at < len(encoded_tensor):
        (size,) = unpack_from("<I", encoded_tensor, at)
        found += unpack_from(f"<{size}s", encoded_tensor, at + 4)
        at += 4 + size
    array = np.empty(len(found), object)
    array[:] = found
    return array


@runtime_checkable
class _Exchanging(Protocol):
    """An object that supports DLPack."""

    def __dlpack__(self) -> Any:
        """The capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Device type and number."""


class _Capsule:
    """A bare DLPack capsule as a readable object. Its device is unknown, but only CPU memory is passed this way."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Tensor:
    """A named array."""

    __slots__ = ("_array", "_name", "datatype")

    def __init__(self, name: str, numpy_array: Array) -> None:
        name = as_text(name, "name")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor(name: str, numpy_array: numpy.ndarray) was called with {type(numpy_array)}")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype = datatype_of(numpy_array)
        if datatype is None:
            raise TritonModelException(
                f"Tensor '{name}' has elements of {numpy_array.dtype}, which is not supported."
            )
        self._name = name
        self.datatype = datatype
        self._array = numpy_array if datatype is Datatype.BYTES else plain(numpy_array)

    @classmethod
    def of(cls, name: str, array: Array, datatype: Datatype) -> "Tensor":
        """A tensor received from the server."""
        made = cls.__new__(cls)
        made._name, made._array, made.datatype = name, array, datatype
        return made

    def name(self) -> str:
        """Name of the tensor."""
        return self._name

    def as_numpy(self) -> Array:
        """The array, not a copy. Raises `TritonModelException` for BF16, which numpy does not have."""
        if self.datatype is Datatype.BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._array

    def data(self) -> Array:
        """The array in the server's form."""
        return as_bytes(self._array) if self.datatype is Datatype.BYTES else self._array

    def triton_dtype(self) -> int:
        """The element type, as numbered in Triton's C API."""
        return NUMBERS[self.datatype]

    def shape(self) -> list[int]:
        """The size of each dimension."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Whether its memory is on the CPU: always."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the tensor's memory."""
        if self.datatype is Datatype.BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        # numpy exports no read-only arrays
        array = self._array if self._array.flags.writeable else self._array.copy()
        if self.datatype is Datatype.BF16:
            torch = _torch("tensors with elements of BF16")
            return torch.from_numpy(array).view(torch.bfloat16).__dlpack__()
        return array.__dlpack__()

    def __dlpack__(self, *, stream: object = None, **_: object) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """A tensor over the memory of a DLPack object or capsule; GPU memory is copied."""
        name = as_text(name, "name")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if type(tensor).__name__ == "PyCapsule":
            tensor = _Capsule(tensor)
        elif not isinstance(tensor, _Exchanging):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule "
                "or have `__dlpack__` and `__dlpack_device__` attributes"
            )
        try:
            array = np.from_dlpack(tensor)
        except (BufferError, RuntimeError, TypeError, ValueError):  # BF16, or memory of another device
            torch = _torch("this DLPack tensor")
            found = torch.from_dlpack(tensor).detach().cpu().contiguous()
            if found.dtype is torch.bfloat16:
                return Tensor.of(name, found.view(torch.uint16).numpy(), Datatype.BF16)
            array = found.numpy()
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order "
                "are supported."
            )
        return Tensor(name, array)


def _torch(what: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise TritonModelException(f"PyTorch is needed to exchange {what}: {error}") from error
    return torch
