"""Reader of GGUF headers: metadata and tensor extents, checked against the file size first.

Own code because the `gguf` package silently reads past the end of truncated files and is not among the dependencies
of llama.cpp's extra; it is used for the tensors themselves.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from forebay.engines.protocol import EngineBroken

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ENTRIES_MAX = 1_000_000
STRING_BYTES_MAX = 64 * 1024 * 1024
ARRAY_ITEMS_MAX = 16_000_000
HEADER_BUFFER_BYTES = 1024 * 1024
ALIGNMENT_DEFAULT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 30: ("BF16", 1, 2),
}  # fmt: skip
"""Tensor type → name, elements per block, bytes per block. The size of other types is not checked."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Location of a tensor. `bytes_size` None: a type of unknown size."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    bytes_size: int | None


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of a GGUF file."""

    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]

    def of_model(self, key: str) -> Any:
        """An entry of the model's architecture, such as `context_length`; None if absent."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")

    def token(self, kind: str) -> str | None:
        """The text of a special token such as `bos` or `eos`; None if the model has none."""
        tokens, id = (
            self.metadata.get("tokenizer.ggml.tokens", ()),
            self.metadata.get(f"tokenizer.ggml.{kind}_token_id"),
        )
        if not isinstance(tokens, list) or not isinstance(id, int) or not 0 <= id < len(tokens):
            return None
        token = tokens[id]
        return token if isinstance(token, str) else None


def read_header(path: Path) -> Header:
    """Read the header of a complete GGUF file. Raises `EngineBroken` if it is missing, invalid or truncated."""
    size = 0
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=HEADER_BUFFER_BYTES) as file:
            header = _Reader(file, size).header()
    except OSError as error:
        raise EngineBroken(f"{path}: cannot be read: {error.strerror or error}") from error
    except EOFError as error:
        text = f"{path}: truncated: the file ends at byte {size}, inside its header. Fetch it again."
        raise EngineBroken(text) from error
    except (ValueError, RecursionError) as error:
        raise EngineBroken(f"{path}: not a usable GGUF model: {error}") from error
    for tensor in header.tensors:
        if tensor.offset + (tensor.bytes_size or 0) > size:
            raise EngineBroken(
                f"{path}: truncated: the file has {size} bytes, but tensor {tensor.name!r} ends at byte "
                f"{tensor.offset + (tensor.bytes_size or 0)}. Fetch it again."
            )
    return header


class _Reader:
    """Reads the fields of a file in order. Every length is checked before use."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    def header(self) -> Header:
        magic = self._file.read(4)
        if magic != MAGIC:
            raise ValueError(f"it begins with {magic!r}, not {MAGIC!r}")
        version = self._scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}; versions {VERSIONS} are known (is it big-endian?)")
        tensor_count, entry_count = self._count("Q", ENTRIES_MAX), self._count("Q", ENTRIES_MAX)
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(entry_count)}
        raw = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment!r} is not a power of two")
        start = -(-self._file.tell() // alignment) * alignment
        tensors = tuple(
            Tensor(name, kind, shape, start + offset, _bytes_size(kind, shape)) for name, kind, shape, offset in raw
        )
        return Header(metadata, tensors)

    def _take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self._size else b""
        if len(data) < count:
            raise EOFError
        return data

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _count(self, code: str, limit: int) -> int:
        count: int = self._scalar(code)
        if count > limit:
            raise ValueError(f"it claims {count} entries; at most {limit} are allowed")
        return count

    def _string(self) -> str:
        return self._take(self._count("Q", STRING_BYTES_MAX)).decode("utf-8", "replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < 4:
            item, count = self._scalar("I"), self._count("Q", ARRAY_ITEMS_MAX)
            if item in _SCALARS:
                code = f"<{count}{_SCALARS[item]}"
                return list(struct.unpack(code, self._take(struct.calcsize(code))))
            return [self._value(item, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata type {kind} is not known")
        return self._scalar(_SCALARS[kind])

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._count("I", 8)))
        return name, self._scalar("I"), shape, self._scalar("Q")


def _bytes_size(kind: int, shape: tuple[int, ...]) -> int | None:
    if kind not in BLOCKS:
        return None
    _, block, size = BLOCKS[kind]
    elements = 1
    for length in shape:
        elements *= length
    return elements // block * size
