"""Looks at a message before it is parsed. Its fields are counted: two bytes of a message can become a Python object
of a hundred, and parsing blocks the event loop. Raw contents are taken out: the parser would copy them twice.
"""

from typing import Final

from forebay.wire.http2.grpc import INVALID_ARGUMENT, BadMessage

WALKED_BYTES: Final = 1 << 20
"""Smaller messages are parsed unchecked: that takes milliseconds, whatever they contain."""
FIELDS_MAX: Final = 250_000
"""For larger messages: inputs with their shapes and parameters, outputs, raw contents, and single strings; packed
integers, which are read one by one, are a quarter of a field each.
"""
_WITHIN: Final = (0x2A, 0x32)
"""Length-delimited fields 5 and 6: inputs and outputs of a request, and contents of an input. No other repeated field
is nested deeper.
"""
_DEPTH_MAX: Final = 2
_INTEGERS: Final = (0x12, 0x1A, 0x22, 0x2A)
"""Length-delimited fields 2 to 5 of the contents of an input."""
_VARINT_BYTES_MAX: Final = 10
_NOT_LAST: Final = bytes(range(128, 256))
"""Bytes of a varint, but for its last one."""
SPLIT_BYTES_MIN: Final = 1 << 15
"""The contents of smaller messages cost less to copy than to find."""
_RAW: Final = 0x3A
"""Length-delimited field 7 of a request: the raw contents of an input."""
_LENGTH_BYTES_MAX: Final = 5
_TOP_MAX: Final = 1024
"""Fields of a message that is searched for raw contents, without those within inputs and outputs."""


def check_fields(message: bytes | memoryview) -> None:
    """Raises `BadMessage` if a message has too many fields. An invalid message is left to the parser."""
    if len(message) > WALKED_BYTES and _walk(message, 0, len(message), 0, FIELDS_MAX) < 0:
        text = f"the message has more than {FIELDS_MAX} fields: send strings and integers as raw contents"
        raise BadMessage(INVALID_ARGUMENT, text)


def split(message: bytes | memoryview) -> tuple[bytes | memoryview, list[memoryview]]:
    """A large request without its raw contents, and these. Other messages stay whole, and invalid ones, too."""
    size = len(message)
    spans: list[tuple[int, int, int]] = []
    if size < SPLIT_BYTES_MIN or not _find_raw(message, size, spans) or not spans:
        return message, []
    view = memoryview(message)
    parts, raw, kept = [], [], 0
    for begin, first, last in spans:
        parts.append(view[kept:begin])
        raw.append(view[first:last])
        kept = last
    parts.append(view[kept:])
    return b"".join(parts), raw


def raw_begins(head: bytes, size: int) -> int:
    """Where the largest of the raw contents begin that a request of that size has in its first bytes; 0: none."""
    spans: list[tuple[int, int, int]] = []
    _find_raw(head, size, spans)
    most = found = 0
    for _, first, last in spans:
        if last - first > most:
            most, found = last - first, first
    return found


def _find_raw(data: bytes | memoryview, size: int, spans: list[tuple[int, int, int]]) -> bool:
    """Collect where the raw contents are in a message of that size which begins with `data`: where the field begins,
    its contents, and where they end. False: it is invalid, or has too many fields, after those.
    """
    at, end = 0, len(data)
    for _ in range(_TOP_MAX):
        if at >= end:
            return at <= size
        begin = at
        key, at = _varint(data, at, end)
        if data[at - 1] > 127 or key < 8 or key >= 1 << 32:
            return False
        kind = key & 7
        if kind == 2:
            if at == end:
                return False
            first = at
            length, at = _varint(data, at, end)
            if data[at - 1] > 127 or at + length > size:
                return False
            if key == _RAW:
                if first > begin + 1 or at > first + _LENGTH_BYTES_MAX:
                    return False  # longer than needed: the parser may not take it
                spans.append((begin, at, at + length))
            at += length
        elif kind == 0:
            _, at = _varint(data, at, end)
            if data[at - 1] > 127:
                return False
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        else:
            return False
    return False


def _walk(data: bytes | memoryview, at: int, end: int, depth: int, left: int) -> int:
    """How many fields are left after this range; negative: too many."""
    while at < end and left >= 0:
        left -= 1
        key, at = _varint(data, at, end)
        kind = key & 7
        if kind == 2:
            size, at = _varint(data, at, end)
            if depth == _DEPTH_MAX and key in _INTEGERS:
                if size > 4 * _VARINT_BYTES_MAX * (left + 1):
                    return -1
                left -= len(bytes(data[at : min(at + size, end)]).translate(None, _NOT_LAST)) // 4
            elif key in _WITHIN and depth < _DEPTH_MAX:
                left = _walk(data, at, min(at + size, end), depth + 1, left)
            at += size
        elif kind == 0:
            _, at = _varint(data, at, end)
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
    return left


def _varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift > 63:
            break
    return value, at
