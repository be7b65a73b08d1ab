"""Header blocks: HPACK (RFC 7541), what makes a list of headers well-formed, and how ours are written.

Clients send the same block again and again once their table is filled. So what a block says is kept for as long as
the table stays as it is, and reading it again is one look into a dictionary.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from hpack import Decoder, HPACKError

T = TypeVar("T")
Header = tuple[bytes, bytes]
LIST_BYTES_MAX: Final = 32_768
"""Of all headers of a request, with 32 bytes for each as HPACK counts."""
BLOCK_BYTES_MAX: Final = 32_768
KEPT_MAX: Final = 64
KEPT_BYTES_MAX: Final = 512
"""Longer blocks are not kept."""
PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED: Final = frozenset({b":method", b":scheme", b":path"})
_OF_HTTP1: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_NAME_BYTES: Final = bytes(set(range(0x21, 0x7F)) - set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ:"))
_RESIZING: Final = frozenset(bytes((first,)) for first in range(0x20, 0x40))
"""How a block begins that changes the size of the table (RFC 7541, section 6.3), even if the table is empty."""
_DIGITS_MAX: Final = 18
"""Of `content-length`: an exabyte."""
_UNSAID: Final = -1
_UNREADABLE: Final = -2
_LENGTH_MAX: Final = 127
"""What the first byte of a length holds."""


class BadBlock(Exception):  # noqa: N818 - states the condition
    """The block cannot be decoded: nothing after it on this connection could be, either."""


class Blocks(Generic[T]):
    """Decodes the blocks of one connection; `read` makes of headers what is kept of them."""

    def __init__(self, read: Callable[[Sequence[Header]], T]) -> None:
        self._read = read
        self._decoder = Decoder(LIST_BYTES_MAX)
        self._kept: dict[bytes, T] = {}

    def decode(self, block: bytes) -> T:
        """What the headers of a block are. Raises `BadBlock`."""
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
            self._kept.clear()  # indexes mean something else from now on
        elif len(block) <= KEPT_BYTES_MAX and block[:1] not in _RESIZING:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[block] = found
        return found


def well_formed(headers: Sequence[Header]) -> bool:
    """Whether headers are those of a request (RFC 9113, section 8.2 and 8.3)."""
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
    """Decodes the blocks of requests and of their trailers.

    What `read` makes of headers, or None if they say two lengths; the content's length in bytes, -1 if they do not
    say it; and whether they may come behind a request (RFC 9113, section 8.1).
    """

    def read_all(headers: Sequence[Header]) -> tuple[T | None, int, bool]:
        size = _content_length(headers)
        trailing = all(_fine_name(name) and _fine_value(value) for name, value in headers)
        return (None if size == _UNREADABLE else read(headers)), size, trailing

    return Blocks(read_all)


def written(headers: Sequence[Header]) -> bytes:
    """A block of plain literals, which no table knows."""
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
    """The newest entry, by its identity."""
    return entries[0] if entries else None


def _length(size: int) -> bytes:
    """An integer after a prefix of 7 bits (RFC 7541, section 5.1)."""
    if size < _LENGTH_MAX:
        return bytes((size,))
    found, rest = bytearray((_LENGTH_MAX,)), size - _LENGTH_MAX
    while rest >= 128:
        found.append(rest & 127 | 128)
        rest >>= 7
    found.append(rest)
    return bytes(found)
