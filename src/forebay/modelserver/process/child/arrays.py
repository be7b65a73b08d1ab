"""Conversion of tensors between bytes, as in the protocol, and arrays, as backends take them."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from forebay.core.serving.config import Datatype
from forebay.core.serving.values import Buffer
from forebay.engines.tensor.arrays import DTYPES, datatype_of, plain
from forebay.engines.tensor.protocol import Array
from forebay.modelserver.process.messages import Piece

LENGTH_BYTES: Final = 4
"""Little-endian length prefix of each BYTES element."""


class BadTensor(Exception):  # noqa: N818 - states the condition
    """An output is not a tensor, or an input's data does not match its description; the text names it."""


def array_of(piece: Piece, part: memoryview) -> Array:
    """An input as an array over the part's memory; BYTES are copied. Raises `BadTensor`."""
    if piece.datatype is Datatype.BYTES:
        return _elements(piece, part[piece.offset : piece.offset + piece.size])
    try:
        made: Array = np.ndarray(piece.shape, DTYPES[piece.datatype], part, piece.offset)
    except (TypeError, ValueError) as error:
        raise BadTensor(f"input '{piece.name}' of shape {list(piece.shape)}: {error}") from error
    if made.nbytes != piece.size:
        raise BadTensor(f"input '{piece.name}' has {piece.size} bytes; shape {list(piece.shape)} needs {made.nbytes}")
    return made


def _elements(piece: Piece, data: memoryview) -> Array:
    elements: list[bytes] = []
    at, end = 0, len(data)
    while at + LENGTH_BYTES <= end:
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        elements.append(bytes(data[start:at]))
    made = np.empty(len(elements), object)
    made[:] = elements
    try:
        if at != end:
            raise ValueError("its elements do not end where its data does")
        return made.reshape(piece.shape)
    except ValueError as error:
        raise BadTensor(f"input '{piece.name}' of shape {list(piece.shape)}: {error}") from error


def tensor_of(name: str, value: object, declared: Mapping[str, Datatype]) -> tuple[Datatype, Array, Buffer, int]:
    """An output's datatype, array, row-major bytes, and their length.

    `declared` are the datatypes of the model's outputs: BF16 cannot be told from its bits otherwise. Raises
    `BadTensor`.
    """
    if not isinstance(value, np.ndarray):
        raise BadTensor(f"output '{name}' is of type {type(value).__name__}, not an array")
    datatype = datatype_of(value)
    if datatype is None:
        raise BadTensor(f"output '{name}' has elements of type {value.dtype}, which the protocol has no name for")
    array = plain(value)
    if datatype is Datatype.BYTES:
        data = joined(array)
        return datatype, array, data, len(data)
    if datatype is Datatype.UINT16 and declared.get(name) is Datatype.BF16:
        datatype = Datatype.BF16
    return datatype, array, array.data, array.nbytes


def joined(array: Array) -> bytes:
    """The elements of a BYTES tensor, each with its length prefix."""
    chunks: list[bytes] = []
    for element in array.ravel().tolist():
        chunks += (len(element).to_bytes(LENGTH_BYTES, "little"), element)
    return b"".join(chunks)
