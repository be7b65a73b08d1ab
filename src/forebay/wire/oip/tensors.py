"""Converts tensors between JSON and bytes.

Numbers become Python objects only if the client sent or wants JSON. Bytes are little-endian, like every platform for
which there are wheels.
"""

import math
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from forebay.core.serving.config import ELEMENT_BYTES, Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Buffer
from forebay.wire.documents import UNREADABLE
from forebay.wire.oip.fields import (
    INT64_MAX,
    NOT_BOOLEAN,
    NOT_NUMBER,
    NOT_SIGNED,
    NOT_STRING,
    NOT_UNSIGNED,
    ODD_BYTES_MAX,
    as_float,
    invalid,
    load,
)

SLICE_BYTES: Final = 262_144
"""Longer data in JSON are parsed and written in slices of about this size. Each takes a millisecond or two, during
which other threads wait, and bounds how many Python objects exist at once."""
SLICE_ELEMENTS: Final = 32_768
ARRAY_ELEMENTS_LEAST: Final = 32
"""From this size on it is faster to write floats from an array than as Python floats."""
ARRAYS_MAX: Final = 4
"""Arrays per element in long data of BYTES: each is an object while it is parsed."""
_BETWEEN: Final = b"[] \t\r\n"
NESTING_MAX: Final = 100
"""Triton's limit on nested arrays."""
TYPED_NESTING_MAX: Final = 8
"""Up to this depth, a typed decoder is made for each."""
LENGTH_BYTES: Final = 4
"""Each element of BYTES is preceded by its length, little-endian."""
_CODES: Final[dict[Datatype, Any]] = {
    Datatype.BOOL: "B", Datatype.UINT8: "B", Datatype.UINT16: "H", Datatype.UINT32: "I", Datatype.UINT64: "Q",
    Datatype.INT8: "b", Datatype.INT16: "h", Datatype.INT32: "i", Datatype.INT64: "q",
    Datatype.FP32: "f", Datatype.FP64: "d",
}  # fmt: skip
_BINARY_ONLY: Final = (Datatype.FP16, Datatype.BF16)
_FLOATS: Final = (Datatype.FP32, Datatype.FP64)
_KINDS: Final[dict[Datatype, Any]] = {
    Datatype.BOOL: bool, Datatype.FP32: float, Datatype.FP64: float, Datatype.BYTES: str,
}  # fmt: skip
"""The type of elements in JSON, if not integers."""
_NOT: Final = {Datatype.BOOL: NOT_BOOLEAN, Datatype.BYTES: NOT_STRING, **dict.fromkeys(_FLOATS, NOT_NUMBER)}

_encode = msgspec.json.Encoder().encode
_length = struct.Struct("<I")
_HEAD_BYTES: Final = 64


def count(name: str, shape: Sequence[int]) -> int:
    """The element count of a shape. Raises `Refused` if it exceeds the limit."""
    elements = 1
    for dim in shape:
        elements *= dim
        if elements > INT64_MAX:  # checked in the loop: the product of a million dimensions takes minutes
            break
        if dim == 0:
            return 0
    else:
        return elements
    what = f"invalid shape for input '{name}': shape {_text(shape)}"
    if dim > INT64_MAX:
        raise invalid(f"{what} contains one or more invalid dimensions")
    raise invalid(f"{what} causes total element count to exceed maximum size of {INT64_MAX}")


def byte_size(datatype: Datatype, elements: int) -> int:
    """The byte size of `elements` elements; of BYTES, the minimum."""
    return elements * (ELEMENT_BYTES[datatype] if datatype is not Datatype.BYTES else LENGTH_BYTES)


def log_prefix(id: str) -> str:
    """The prefix that Triton puts before errors of a request that it has parsed."""
    return f"[request id: {id or '<id_unknown>'}] "


# --- JSON to bytes


def pack(name: str, datatype: Datatype, data: msgspec.Raw, elements: int) -> bytes:
    """The bytes of JSON data, flat or nested. Raises `Refused`, also if the number of numeric elements is wrong.

    The number of strings is checked where requests are checked against the model, as with binary tensors.
    """
    if datatype in _CODES and len(memoryview(data)) > SLICE_BYTES:
        packed = _pack_in_slices(name, datatype, memoryview(data), elements)
        if packed is not None:
            return packed
        if len(memoryview(data)) > ODD_BYTES_MAX:
            raise _not_so(datatype)
    elif datatype is Datatype.BYTES and len(memoryview(data)) > ODD_BYTES_MAX:
        _check_strings(memoryview(data), elements)
    values = read_values(name, datatype, data)
    if datatype is Datatype.BYTES:
        return pack_strings(values[: elements + 1])  # one more than expected is enough for the check to fail
    _check_count(len(values), elements)
    return pack_numbers(name, datatype, values)


def read_values(name: str, datatype: Datatype, data: msgspec.Raw) -> list[Any]:
    """The elements of JSON data, in order. Raises `Refused`."""
    if datatype in _BINARY_ONLY:
        raise invalid(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    head = bytes(memoryview(data)[:_HEAD_BYTES]).lstrip()
    if head[:1] != b"[":
        raise invalid("Unable to parse 'data': attempt to access JSON non-array as array")
    depth = _depth(head)
    if depth <= TYPED_NESTING_MAX:
        try:
            values: list[Any] = _reader(_KINDS.get(datatype, int), depth)(data)
        except UNREADABLE:
            pass  # arrays of different depths, NaN, or elements of the wrong type
        else:
            for _ in range(depth - 1):
                values = list(chain.from_iterable(values))
            return values
    if len(memoryview(data)) > ODD_BYTES_MAX:
        raise _not_so(datatype)
    return flatten(datatype, load(data))


def flatten(datatype: Datatype, document: Any) -> list[Any]:
    """The elements of a JSON value that may be a nested array. Raises `Refused`."""
    values: list[Any] = []
    wanted = {_KINDS.get(datatype, int)}
    rows = [iter([document])]
    while rows:
        for each in rows[-1]:
            if type(each) is list:
                if set(map(type, each)) == wanted and len(rows) < NESTING_MAX:
                    values += each
                    continue
                if len(rows) >= NESTING_MAX:
                    raise invalid(
                        f"Unable to parse 'data': JSON nesting depth exceeds maximum allowed limit ({NESTING_MAX})"
                    )
                rows.append(iter(each))
                break
            values.append(_checked(datatype, each))
        else:
            rows.pop()
    return values


def pack_numbers(name: str, datatype: Datatype, values: list[Any]) -> bytes:
    """The bytes of numbers. Raises `Refused` for values out of the type's range."""
    code = _CODES[datatype]
    try:
        return array(code, values).tobytes()
    except OverflowError:
        if code.isupper() and min(values) < 0:
            raise invalid(f"Unable to parse 'data': {NOT_UNSIGNED}") from None
        raise invalid(f"Unable to parse 'data': input '{name}' has a value that {datatype} cannot hold") from None


def pack_strings(values: list[str]) -> bytes:
    """The bytes of BYTES elements that are text."""
    texts = [value.encode() for value in values]
    return b"".join([part for text in texts for part in (_length.pack(len(text)), text)])


def prefixed(data: Buffer) -> bytes:
    """One element of BYTES."""
    return _length.pack(len(data)) + bytes(data)


def exceeds(text: memoryview, mark: bytes, most: int) -> bool:
    """Whether a byte occurs in JSON more than `most` times outside strings; for a quote, as a delimiter.

    The text is processed in slices, so that other threads can run in between.
    """
    starts = range(0, len(text), SLICE_BYTES)
    if sum(bytes(text[at : at + SLICE_BYTES]).count(mark) for at in starts) <= most:
        return False
    marks = quotes = at = 0
    while at < len(text) and marks <= most:
        part = bytes(text[at : at + SLICE_BYTES])
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # do not split between a backslash and what it escapes
            part = bytes(text[at : at + SLICE_BYTES + 1])
        at += len(part)
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        marks += len(pieces) - 1 if mark == b'"' else sum(piece.count(mark) for piece in pieces[quotes % 2 :: 2])
        quotes += len(pieces) - 1
    return marks > most


def _check_strings(data: memoryview, elements: int) -> None:
    """Raises `Refused` if long data would create so many objects that other requests had to wait."""
    if exceeds(data, b'"', 2 * elements):
        raise invalid("Unable to parse 'data': Shape does not match true shape of 'data' field")
    if exceeds(data, b"[", ARRAYS_MAX * elements + NESTING_MAX):
        raise invalid(f"Unable to parse 'data': long data of BYTES may have {ARRAYS_MAX} arrays for each element")


def _pack_in_slices(name: str, datatype: Datatype, data: memoryview, elements: int) -> bytes | None:
    """The bytes of valid JSON if it is arrays of numbers, however nested; None if it contains anything else.

    The nesting has no meaning, so without their brackets the arrays can be split at any comma.
    """
    decode = _reader(_KINDS.get(datatype, int), 1)
    packed = bytearray()
    at = found = 0
    while at < len(data):
        part = bytes(data[at : at + SLICE_BYTES])
        end = len(part) if at + len(part) == len(data) else part.rfind(b",")
        if end < 0:
            return None
        try:
            values: list[Any] = decode(msgspec.Raw(b"[%b]" % part[:end].translate(None, _BETWEEN)))
        except UNREADABLE:
            return None
        found += len(values)
        if found > elements:
            break
        packed += pack_numbers(name, datatype, values)
        at += end + 1
    _check_count(found, elements)
    return bytes(packed)


def _check_count(found: int, elements: int) -> None:
    if found > elements:
        raise invalid("Unable to parse 'data': Shape does not match true shape of 'data' field")
    if found < elements:
        raise invalid("Failed to parse 'data' field: shape does not match true shape")


# --- bytes to JSON


def always() -> bool:
    """The default of `wanted`: the client waits."""
    return True


def unpack(name: str, datatype: Datatype, data: Buffer, elements: int, wanted: Callable[[], bool] = always) -> bytes:
    """The JSON of a tensor: a flat array. Raises `Refused`; CANCELLED soon after `wanted` turns False."""
    if datatype is Datatype.BYTES:
        texts = _strings(name, data, elements)
        return _encode(texts) if elements <= SLICE_ELEMENTS else _in_slices(_encode, texts, wanted)
    if datatype in _BINARY_ONLY:
        raise invalid(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    if len(data) != byte_size(datatype, elements):
        raise _output_size(name)
    values = memoryview(data).cast("B").cast(_CODES[datatype])
    write = _floats if datatype in _FLOATS else _booleans if datatype is Datatype.BOOL else _integers
    return write(values) if elements <= SLICE_ELEMENTS else _in_slices(write, values, wanted)


def numbers(datatype: Datatype, data: Buffer) -> list[Any]:
    """The elements of a numeric tensor."""
    values: list[Any] = memoryview(data).cast("B").cast(_CODES[datatype]).tolist()
    return values


def split(data: Buffer) -> list[memoryview]:
    """The elements of BYTES. Raises ValueError if their lengths exceed the data."""
    view = memoryview(data)
    at, end, parts = 0, len(view), []
    unpack_from = _length.unpack_from
    while at < end:
        if end - at < LENGTH_BYTES:
            raise ValueError(at)
        at += LENGTH_BYTES
        (size,) = unpack_from(view, at - LENGTH_BYTES)
        if size > end - at:
            raise ValueError(at)
        parts.append(view[at : at + size])
        at += size
    return parts


# --- internal


def _text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _depth(head: bytes) -> int:
    """How many arrays open before the first element."""
    depth = 0
    for byte in head:
        if byte == 91:
            depth += 1
        elif byte not in b" \t\r\n":
            break
    return depth


@lru_cache(maxsize=64)
def _reader(kind: Any, depth: int) -> Callable[[msgspec.Raw], list[Any]]:
    for _ in range(depth):
        kind = list[kind]
    decode: Callable[[msgspec.Raw], list[Any]] = msgspec.json.Decoder(kind).decode
    return decode


def _checked(datatype: Datatype, value: Any) -> Any:
    wanted = _KINDS.get(datatype, int)
    if type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
        return as_float(value)
    raise _not_so(datatype)


def _not_so(datatype: Datatype) -> Refused:
    wanted = _NOT.get(datatype, NOT_UNSIGNED if datatype[0] == "U" else NOT_SIGNED)
    return invalid(f"Unable to parse 'data': {wanted}")


def _in_slices(write: Callable[[Any], bytes], values: Sequence[Any], wanted: Callable[[], bool]) -> bytes:
    slices: list[bytes] = []
    for at in range(0, len(values), SLICE_ELEMENTS):
        if not wanted():
            raise Refused(Kind.CANCELLED, "the client has disconnected")
        slices.append(write(values[at : at + SLICE_ELEMENTS])[1:-1])
    return b"[%b]" % b",".join(slices)


def _booleans(values: memoryview) -> bytes:
    return _encode([each != 0 for each in values])


def _integers(values: memoryview) -> bytes:
    return _encode(values.tolist())


def _floats(values: memoryview) -> bytes:
    """An FP32 is written with the digits of the FP64 of the same value, as in Triton."""
    if len(values) < ARRAY_ELEMENTS_LEAST:
        text = orjson.dumps(values.tolist())
    else:
        with np.errstate(invalid="ignore"):  # a signalling NaN is one NaN among others
            array = np.asarray(values).astype(np.float64)
        text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"[%b]" % b",".join(map(_number, values.tolist())) if b"null" in text else text


def _strings(name: str, data: Buffer, elements: int) -> list[str]:
    try:
        parts = split(data)
    except ValueError:
        raise _output_size(name) from None
    if len(parts) != elements:
        raise _output_size(name)
    try:
        return [str(part, "utf-8") for part in parts]
    except UnicodeDecodeError:
        raise invalid(
            f"sending BYTES data that is not UTF-8 via JSON is not supported. "
            f"Please use the binary data format for output '{name}'"
        ) from None


def _output_size(name: str) -> Refused:
    return Refused(
        Kind.INTERNAL,
        f"Failed to write 'data' field: output tensor shape does not match size of output for '{name}'",
    )


def _number(value: float) -> bytes:
    if math.isfinite(value):
        return orjson.dumps(value)
    return b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"
