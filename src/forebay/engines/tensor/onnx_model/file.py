"""Checks the external files that an ONNX file refers to: they must lie in its own folder, if it is a link in that of
the link or of its target.

Parses only the parts of the protobuf encoding that lead to `TensorProto.external_data` (onnx.proto, field numbers).
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DEPTH_MAX: Final = 32
"""Nesting of graphs; the file is untrusted."""

_TENSOR = "tensor"
_CHILDREN: Final = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: _TENSOR, 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: _TENSOR, 6: "graph", 10: _TENSOR, 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: _TENSOR, 2: _TENSOR},
}
"""Message → field number → nested message that may contain tensors."""
_EXTERNAL_DATA: Final = 13


def outside(file: Path) -> Iterator[str]:
    """A problem for each referenced file that is missing or lies outside the model's folder."""
    try:
        names = sorted(set(_external(file)))
    except ValueError as error:
        yield f"{file.name} is not a whole ONNX file: {error}"
        return
    folder = file.parent.resolve()
    folders = (folder, file.resolve().parent)  # caches such as Hugging Face's link both to one folder of contents
    for name in names:
        target = (folder / name).resolve()
        if not any(target.is_relative_to(each) for each in folders):
            yield f"{file.name} refers to {name!r}, which lies outside its folder"
        elif not target.is_file():
            yield f"{file.name} keeps weights in {name!r}, which is missing"


def _external(file: Path) -> Iterator[str]:
    if not file.stat().st_size:
        raise ValueError("it is empty")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield from _below(data, 0, len(data), "model", 0)


def _below(data: mmap.mmap, start: int, end: int, kind: str, depth: int) -> Iterator[str]:
    if depth > DEPTH_MAX:
        raise ValueError(f"its graphs are nested more than {DEPTH_MAX} deep")
    for number, at, stop in _fields(data, start, end):
        if kind == _TENSOR:
            if number == _EXTERNAL_DATA:
                yield from _location(data, at, stop)
        elif number in _CHILDREN[kind]:
            yield from _below(data, at, stop, _CHILDREN[kind][number], depth + 1)


def _location(data: mmap.mmap, start: int, end: int) -> Iterator[str]:
    entry = {number: data[at:stop] for number, at, stop in _fields(data, start, end)}
    if entry.get(1) == b"location":
        yield entry.get(2, b"").decode("utf-8", "surrogateescape")


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of a message's length-delimited fields; others are skipped."""
    at = start
    while at < end:
        tag, at = _varint(data, at, end)
        match tag & 7:
            case 0:
                _, at = _varint(data, at, end)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                length, at = _varint(data, at, end)
                if length > end - at:
                    raise ValueError(f"it ends within a field at byte {at}")
                yield tag >> 3, at, at + length
                at += length
            case _:
                raise ValueError(f"invalid protobuf at byte {at}")
    if at > end:
        raise ValueError(f"it ends within a field at byte {at}")


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError(f"it ends within a number at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"invalid protobuf at byte {at}")
