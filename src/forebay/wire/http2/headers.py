"""Header blocks: HPACK decoding (RFC 7541), validation of header lists, and encoding of ours.

Clients repeat the same block once their dynamic table is filled. So decoded blocks are cached for as long as the
table does not change: decoding one again is a dictionary lookup.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from hpack import Decoder, HPACKError

from forebay.wire.http2.frames import CALM_DOWN, ProtocolViolation

T = TypeVar("T")
Header = tuple[bytes, bytes]
LIST_BYTES_MAX: Final = 32_768
"""Of all headers of a request, with HPACK's overhead of 32 bytes for each."""
BLOCK_BYTES_MAX: Final = 32_768
CONTINUATIONS_MAX: Final = 16
"""How many frames a header block may be split into, after its first."""
KEPT_MAX: Final = 64
KEPT_BYTES_MAX: Final = 512
"""Longer blocks are not cached."""
PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED: Final = frozenset({b":method", b":scheme", b":path"})
_OF_HTTP1: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_NAME_BYTES: Final = bytes(set(range(0x21, 0x7F)) - set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ:"))
_RESIZING: Final = frozenset(bytes((first,)) for first in range(0x20, 0x40))
"""The first bytes of a block that resizes the dynamic table (RFC 7541, section 6.3), even if the table is empty."""
_DIGITS_MAX: Final = 18
"""Of `content-length`: up to an exabyte."""
_UNSAID: Final = -1
_UNREADABLE: Final = -2
_LENGTH_MAX: Final = 127
"""The largest length that fits the first byte."""


class BadBlock(Exception):  # noqa: N818 - states the condition
    """The block cannot be decoded, and neither can any later one on this connection."""


class PartialBlock:
    """The header block of `stream` of which more frames are to come; `flags` are those of its HEADERS frame."""

    __slots__ = ("_continuations", "data", "flags", "stream")

    def __init__(self, stream: int, flags: int, data: bytes) -> None:
        self.stream = stream
        self.flags = flags
        self.data = bytearray(data)
        self._continuations = 0

    def add(self, data: bytes) -> None:
        """Append the content of a CONTINUATION frame. Raises `ProtocolViolation` if the block gets too large."""
        self.data += data
        self._continuations += 1
        if len(self.data) > BLOCK_BYTES_MAX or self._continuations > CONTINUATIONS_MAX:
            text = f"headers are over {BLOCK_BYTES_MAX} bytes, or {CONTINUATIONS_MAX} frames"
            raise ProtocolViolation(CALM_DOWN, text)


class Blocks(Generic[T]):
    """Decodes and caches the header blocks of one connection; `read` converts headers to the cached value."""

    def __init__(self, read: Callable[[Sequence[Header]], T]) -> None:
        self._read = read
        self._decoder = Decoder(LIST_BYTES_MAX)
        self._kept: dict[bytes, T] = {}

    def decode(self, block: bytes) -> T:
        """The value of a block's headers. Raises `BadBlock`."""
        found = self._kept.get(block)
        if found is not None:
            return found
        entries: Sequence[object] = self._decoder.header_table.dynamic_entries
        count, newest = len(entries), _first(entries)
        try:
            headers = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except (HPACKError, IndexError) as error:
            raise BadBlock(str(error)) from None
        found = self._read(headers)
        if len(entries) != count or _first(entries) is not newest:
            self._kept.clear()  # the indexes have a different meaning from now on
        elif len(block) <= KEPT_BYTES_MAX and block[:1] not in _RESIZING:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[block] = found
        return found


def well_formed(headers: Sequence[Header]) -> bool:
    """Whether headers are valid for a request (RFC 9113, sections 8.2 and 8.3)."""
    pseudo: set[bytes] = set()
    plain = False
    for name, value in headers:
        if name.startswith(b":"):
            if plain or name in pseudo or name not in PSEUDO:
                return False
            pseudo.add(name)
        else:
            plain = True
            if not _fine_name(name) or (name == b"te" and value != b"trailers"):
                return False
        if not _fine_value(value):
            return False
    return pseudo >= _NEEDED and (b":path", b"") not in headers


def requests(read: Callable[[Sequence[Header]], T | None]) -> Blocks[tuple[T | None, int, bool]]:
    """Decodes the header blocks of requests and their trailers.

    Each gives: the result of `read`, or None if `content-length` is invalid or contradictory; the content's length in
    bytes, -1 if not given; and whether the headers are valid as trailers (RFC 9113, section 8.1).
    """

    def read_all(headers: Sequence[Header]) -> tuple[T | None, int, bool]:
        size = _content_length(headers)
        trailing = all(_fine_name(name) and _fine_value(value) for name, value in headers)
        return (None if size == _UNREADABLE else read(headers)), size, trailing

    return Blocks(read_all)


def written(headers: Sequence[Header]) -> bytes:
    """A header block of literals that do not use the dynamic table."""
    parts: list[bytes] = []
    for name, value in headers:
        parts += (b"\0", _length(len(name)), name, _length(len(value)), value)
    return b"".join(parts)


def _content_length(headers: Sequence[Header]) -> int:
    found = _UNSAID
    for name, value in headers:
        if name == b"content-length":
            said = int(value) if value.isdigit() and len(value) <= _DIGITS_MAX else _UNREADABLE
            found = said if found in (_UNSAID, said) else _UNREADABLE
    return found


def _fine_name(name: bytes) -> bool:
    return bool(name) and not name.strip(_NAME_BYTES) and name not in _OF_HTTP1


def _fine_value(value: bytes) -> bool:
    return not (b"\0" in value or b"\r" in value or b"\n" in value)


def _first(entries: Sequence[object]) -> object:
    """The newest entry, to be compared by identity."""
    return entries[0] if entries else None


def _length(size: int) -> bytes:
    """An integer with a 7-bit prefix (RFC 7541, section 5.1)."""
    if size < _LENGTH_MAX:
        return bytes((size,))
    found, rest = bytearray((_LENGTH_MAX,)), size - _LENGTH_MAX
    while rest >= 128:
        found.append(rest & 127 | 128)
        rest >>= 7
    found.append(rest)
    return bytes(found)
