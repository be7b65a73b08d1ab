"""Counts a message's fields before it is parsed: two bytes of a message can become a Python object of a hundred, and
parsing blocks the event loop.
"""

from typing import Final

from forebay.wire.http2.grpc import INVALID_ARGUMENT, BadMessage

WALKED_BYTES: Final = 1 << 20
"""Smaller messages are parsed unchecked: that takes milliseconds, whatever they contain."""
FIELDS_MAX: Final = 250_000
"""For larger messages: inputs with their shapes and parameters, outputs, raw contents, and single strings."""
_WITHIN: Final = (0x2A, 0x32)
"""Length-delimited fields 5 and 6: inputs and outputs of a request, and contents of an input. No other repeated field
is nested deeper.
"""
_DEPTH_MAX: Final = 2


def check_fields(message: bytes | memoryview) -> None:
    """Raises `BadMessage` if a message has too many fields. An invalid message is left to the parser."""
    if len(message) > WALKED_BYTES and _walk(message, 0, len(message), 0, FIELDS_MAX) < 0:
        text = f"the message has more than {FIELDS_MAX} fields: send strings as raw contents"
        raise BadMessage(INVALID_ARGUMENT, text)


def _walk(data: bytes | memoryview, at: int, end: int, depth: int, left: int) -> int:
    """How many fields are left after this range; negative: too many."""
    while at < end and left >= 0:
        left -= 1
        key, at = _varint(data, at, end)
        kind = key & 7
        if kind == 2:
            size, at = _varint(data, at, end)
            if key in _WITHIN and depth < _DEPTH_MAX:
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
