"""gRPC over HTTP/2, as its specification has it: messages with their length, deadlines, codings, how a call ends."""

import zlib
from collections.abc import Callable
from struct import Struct
from typing import Final

from forebay.wire.http2.headers import written

OK: Final = 0
CANCELLED: Final = 1
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
NOT_FOUND: Final = 5
ALREADY_EXISTS: Final = 6
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14

PREFIX: Final = Struct(">BI")
"""Before a message: whether it is packed, and its length."""
PREFIX_BYTES: Final = 5
MESSAGE_BYTES_MAX: Final = 2**31 - 1
"""gRPC's own limit."""
UNPACKED_BYTES_MAX: Final = 256 * 2**20
"""Of a message that was packed, which may hold a thousand times as much as it shows."""
TEXT_BYTES_MAX: Final = 6_000
"""Of the text of an error, as it is sent: clients take about 8 KiB of headers."""
CODINGS: Final = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}
ACCEPTED: Final = b"identity, deflate, gzip"
_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT_DIGITS_MAX: Final = 8
_STATUS_200: Final = b"\x88"
"""`:status: 200` in the table that every HPACK decoder has."""
_LEVEL: Final = 1
"""Higher ones take several times as long and save little on tensors."""


class BadMessage(Exception):  # noqa: N818 - states the condition
    """The call ends with that code."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


def answer_head(coding: bytes = b"") -> bytes:
    """The header block of an answer whose messages may be packed so."""
    packed = [(b"grpc-encoding", coding)] if coding else []
    headers = [(b"content-type", b"application/grpc"), (b"grpc-accept-encoding", ACCEPTED), *packed]
    return _STATUS_200 + written(headers)


def answer_tail(code: int, text: str = "", retry_after_s: int = 0, *, alone: bool = False) -> bytes:
    """The header block that ends a call; `alone` if nothing came before it. `retry_after_s` as gRFC A6 has it."""
    headers = [(b"grpc-status", b"%d" % code)]
    if text:
        headers.append((b"grpc-message", escaped(text)))
    if retry_after_s:
        headers.append((b"grpc-retry-pushback-ms", b"%d" % (retry_after_s * 1000)))
    status = written(headers)
    return answer_head() + status if alone else status


def escaped(text: str) -> bytes:
    """Text for `grpc-message`: UTF-8 in percent encoding, cut off where it gets too long."""
    parts: list[bytes] = []
    size = 0
    for letter in text:
        raw = letter.encode("utf-8", "replace")
        part = raw if b" " <= raw <= b"~" and raw != b"%" else b"".join(b"%%%02X" % byte for byte in raw)
        size += len(part)
        if size > TEXT_BYTES_MAX:
            break
        parts.append(part)
    return b"".join(parts)


def timeout_s(value: bytes) -> float:
    """What `grpc-timeout` says. Raises ValueError."""
    digits, unit = value[:-1], _UNITS.get(value[-1:])
    if unit is None or not digits.isdigit() or len(digits) > _TIMEOUT_DIGITS_MAX:
        raise ValueError("expected up to 8 digits and a unit")
    return int(digits) * unit


def framed(message: bytes) -> bytes:
    """A message as it is sent."""
    return PREFIX.pack(0, len(message)) + message


def packed(message: bytes, coding: bytes) -> bytes:
    """A message as it is sent, packed."""
    packer = zlib.compressobj(_LEVEL, wbits=CODINGS[coding])
    data = packer.compress(message) + packer.flush()
    return PREFIX.pack(1, len(data)) + data


class Room:
    """Bytes of messages that have come in part, of all calls together."""

    __slots__ = ("bytes_max", "taken")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.taken = 0

    def hold(self, before: int, now: int) -> int:
        """Hold so many bytes instead of `before`, which are returned. One call alone may hold any number.

        Raises `BadMessage`, and then `before` is still held.
        """
        others = self.taken - before
        if others and now > before and others + now > self.bytes_max:
            raise BadMessage(UNAVAILABLE, f"messages that are being received have over {self.bytes_max} bytes")
        self.taken = others + now
        return now


class Messages:
    """Puts messages together from bytes that are split anywhere."""

    __slots__ = ("_buffer", "_bytes_max", "count")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()
        self.count = 0
        """How many have been whole."""

    @property
    def size(self) -> int:
        """Bytes of the message that is not whole yet."""
        return len(self._buffer)

    @property
    def waiting(self) -> bool:
        """A message has begun but not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes | memoryview, take: Callable[[bytes, bool], None]) -> None:
        """Hand each whole message to `take`, and whether it is packed. May not be fed again after a `BadMessage`."""
        buffer = self._buffer
        buffer += data
        at, size = 0, len(buffer)
        while size - at >= PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(buffer, at)
            if length > self._bytes_max:
                raise too_large(length, self._bytes_max)
            end = at + PREFIX_BYTES + length
            if end > size:
                break
            with memoryview(buffer) as view:
                message = bytes(view[at + PREFIX_BYTES : end])
            at = end
            self.count += 1
            take(message, flag != 0)
        del buffer[:at]


def unpacked(message: bytes, coding: bytes, bytes_max: int) -> bytes:
    """What a packed message holds. Raises `BadMessage`."""
    if not coding:
        raise BadMessage(INTERNAL, "a message is packed, but grpc-encoding does not say how")
    most = min(bytes_max, UNPACKED_BYTES_MAX)
    reader = zlib.decompressobj(CODINGS[coding])
    try:
        data = reader.decompress(message, most + 1)
    except zlib.error:
        raise BadMessage(INTERNAL, f"a message is not {coding.decode()}") from None
    if len(data) > most:
        raise too_large(len(data), most, "unpacked ")
    if not reader.eof:
        raise BadMessage(INTERNAL, f"a message is not whole {coding.decode()}")
    return data


def too_large(size: int, most: int, what: str = "") -> BadMessage:
    """The refusal of a message over the limit."""
    hint = "Use --grpc-max-message-size to increase the limit."
    return BadMessage(RESOURCE_EXHAUSTED, f"Received {what}message larger than max ({size} vs. {most}). {hint}")
