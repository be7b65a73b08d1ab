"""How many fields a message has, found out before it is read: of two bytes in a message, protobuf makes an object of
a hundred, and meanwhile nobody else gets an answer.
"""

from typing import Final

from forebay.wire.http2.grpc import INVALID_ARGUMENT, BadMessage

WALKED_BYTES: Final = 1 << 20
"""Messages up to here are read as they are: it takes milliseconds, whatever is in them."""
FIELDS_MAX: Final = 250_000
"""In a longer message: inputs with their shapes and parameters, outputs, raw contents, and texts one by one."""
_WITHIN: Final = (0x2A, 0x32)
"""Fields 5 and 6 with a length: inputs and outputs of a request, and the contents of an input. Nothing else that
repeats is deeper in a message."""
_DEPTH_MAX: Final = 2


def check_fields(message: bytes | memoryview) -> None:
    """Raises `BadMessage` for a message of too many fields. One that is no message at all is for its reader."""
    if len(message) > WALKED_BYTES and _walk(message, 0, len(message), 0, FIELDS_MAX) < 0:
        text = f"a message of more than {FIELDS_MAX} fields is not read: send texts as raw contents"
        raise BadMessage(INVALID_ARGUMENT, text)


def _walk(data: bytes | memoryview, at: int, end: int, depth: int, left: int) -> int:
    """How many more fields there may be behind this; negative: none, and there are some."""
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
    """A number, and where it ends."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift > 63:
            break
    return value, at
