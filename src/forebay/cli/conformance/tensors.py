"""Conversion of tensors to bytes and JSON, for clients only: the suite shares no code with the server under test."""

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from forebay.cli.conformance.check import Json

FORMATS: Final = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i",
    "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d", "BF16": "H",
}  # fmt: skip
"""`struct` format of one element. BF16 is shown as its 16 bits."""


def packed(datatype: str, values: Iterable[bool | int | float | bytes]) -> bytes:
    """The binary form. BYTES elements have a length prefix of 4 bytes, little-endian."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(each)) + each for each in values if isinstance(each, bytes))
    given = list(values)
    return struct.pack(f"<{len(given)}{FORMATS[datatype]}", *given)


def unpacked(datatype: str, data: bytes) -> list[Json]:
    """The values of the binary form; BYTES as text, one character per byte. Raises struct.error if malformed."""
    if datatype != "BYTES":
        size = struct.calcsize(FORMATS[datatype])
        return list(struct.unpack(f"<{len(data) // size}{FORMATS[datatype]}", data))
    values: list[Json] = []
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        values.append(data[at + 4 : at + 4 + length].decode("latin-1"))
        at += 4 + length
    return values


def rounded(datatype: str, values: Json) -> Json:
    """JSON numbers rounded to the datatype: servers print the same float with more or fewer digits."""
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [rounded(datatype, each) for each in values]
    if datatype in {"FP16", "FP32"} and isinstance(values, int | float) and not isinstance(values, bool):
        form = "<" + FORMATS[datatype]
        (number,) = struct.unpack(form, struct.pack(form, values))
        return float(number)
    return values
