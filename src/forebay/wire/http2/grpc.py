"""gRPC over HTTP/2, as specified: length-prefixed messages, deadlines, compression, status."""

import zlib
from collections.abc import Callable
from struct import Struct
from typing import Final, TypeAlias

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
"""The prefix of a message: whether it is compressed, and its length."""
PREFIX_BYTES: Final = 5
HEAD_BYTES_MAX: Final = 4096
"""How much of a message is looked at to decide where it is put."""
Place: TypeAlias = Callable[[int, bytes], memoryview | None]
"""Where a message of so many bytes, which begins like that, is to be put; None: wherever."""
MESSAGE_BYTES_MAX: Final = 2**31 - 1
"""gRPC's own limit."""
UNPACKED_BYTES_MAX: Final = 256 * 2**20
"""Of a compressed message after decompression, which may be a thousand times as large."""
TEXT_BYTES_MAX: Final = 6_000
"""Of an error text as sent: clients accept about 8 KiB of headers."""
CODINGS: Final = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}
ACCEPTED: Final = b"identity, deflate, gzip"
_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT_DIGITS_MAX: Final = 8
_STATUS_200: Final = b"\x88"
"""`:status: 200` in HPACK's static table."""
_LEVEL: Final = 1
"""Higher levels take several times as long and save little on tensors."""


class BadMessage(Exception):  # noqa: N818 - states the condition
    """An invalid message: the call ends with that status code."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


def answer_head(coding: bytes = b"") -> bytes:
    """The header block of a response; `coding` is that of its compressed messages."""
    packed = [(b"grpc-encoding", coding)] if coding else []
    headers = [(b"content-type", b"application/grpc"), (b"grpc-accept-encoding", ACCEPTED), *packed]
    return _STATUS_200 + written(headers)


def answer_tail(code: int, text: str = "", retry_after_s: int = 0, *, alone: bool = False) -> bytes:
    """The header block that ends a call; `alone` if nothing was sent before it. `retry_after_s`: pushback of gRFC
    A6."""
    headers = [(b"grpc-status", b"%d" % code)]
    if text:
        headers.append((b"grpc-message", escaped(text)))
    if retry_after_s:
        headers.append((b"grpc-retry-pushback-ms", b"%d" % (retry_after_s * 1000)))
    status = written(headers)
    return answer_head() + status if alone else status


def escaped(text: str) -> bytes:
    """Text for `grpc-message`: percent-encoded UTF-8, truncated to `TEXT_BYTES_MAX`."""
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
    """The seconds of a `grpc-timeout` value. Raises ValueError."""
    digits, unit = value[:-1], _UNITS.get(value[-1:])
    if unit is None or not digits.isdigit() or len(digits) > _TIMEOUT_DIGITS_MAX:
        raise ValueError("expected up to 8 digits and a unit")
    return int(digits) * unit


def framed(message: bytes) -> bytes:
    """A message with its prefix."""
    return PREFIX.pack(0, len(message)) + message


def packed(message: bytes, coding: bytes) -> bytes:
    """A message compressed, with its prefix."""
    packer = zlib.compressobj(_LEVEL, wbits=CODINGS[coding])
    data = packer.compress(message) + packer.flush()
    return PREFIX.pack(1, len(data)) + data


class ReceiveBudget:
    """Limit on the bytes of incomplete messages, of all calls together."""

    __slots__ = ("bytes_max", "taken")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.taken = 0

    def hold(self, before: int, now: int) -> int:
        """Reserve `now` bytes instead of `before`; returns `now`. A lone call may reserve any number.

        Raises `BadMessage`, and then `before` stays reserved.
        """
        others = self.taken - before
        if others and now > before and others + now > self.bytes_max:
            raise BadMessage(UNAVAILABLE, f"messages that are being received have over {self.bytes_max} bytes")
        self.taken = others + now
        return now


class Messages:
    """Reassembles messages from bytes that are split anywhere. `place` is asked about those that come in parts and
    are not compressed.
    """

    __slots__ = ("_at", "_buffer", "_bytes_max", "_place", "_placed", "_room", "count")

    def __init__(self, bytes_max: int, place: Place | None = None) -> None:
        self._bytes_max = bytes_max
        self._place = place
        self._placed = -1
        """The last message that `place` was asked about."""
        self._room: memoryview | None = None
        """Where the incomplete message is put, without its prefix, which has been filled up to `_at`."""
        self._at = 0
        self._buffer = bytearray()
        """The incomplete message otherwise."""
        self.count = 0
        """How many messages have been completed."""

    @property
    def size(self) -> int:
        """Bytes of the incomplete message."""
        return len(self._buffer) + self._at

    @property
    def waiting(self) -> bool:
        """Whether a message has begun but not ended."""
        return self._room is not None or bool(self._buffer)

    def feed(self, data: bytes | memoryview, take: Callable[[bytes | memoryview, bool], None]) -> None:
        """Pass each complete message to `take`, and whether it is compressed. Unusable after a `BadMessage`."""
        if self._room is not None:
            data = self._fill(self._room, data, take)
            if not data:
                return
        buffer = self._buffer
        buffer += data
        at, size = 0, len(buffer)
        while size - at >= PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(buffer, at)
            if length > self._bytes_max:
                raise too_large(length, self._bytes_max)
            end = at + PREFIX_BYTES + length
            if end > size:
                if not flag and self._find_room(length, at + PREFIX_BYTES):
                    at = size
                break
            with memoryview(buffer) as view:
                message = bytes(view[at + PREFIX_BYTES : end])
            at = end
            self.count += 1
            take(message, flag != 0)
        del buffer[:at]

    def _find_room(self, length: int, at: int) -> bool:
        """Move a message that begins there in the buffer to where it is to be put, if that is elsewhere."""
        if self._place is None or self._placed == self.count:
            return False
        self._placed = self.count
        with memoryview(self._buffer) as view:
            self._room = room = self._place(length, bytes(view[at : at + HEAD_BYTES_MAX]))
            if room is None:
                return False
            self._at = len(view) - at
            room[: self._at] = view[at:]
        return True

    def _fill(
        self, room: memoryview, data: bytes | memoryview, take: Callable[[bytes | memoryview, bool], None]
    ) -> bytes | memoryview:
        """Put data where the message goes; returns what comes after the message."""
        at = self._at
        size = min(len(room) - at, len(data))
        room[at : at + size] = data[:size]
        self._at = at + size
        if self._at == len(room):
            self._room = None
            self._at = 0
            self.count += 1
            take(room, False)
        return data[size:]


def unpacked(message: bytes | memoryview, coding: bytes, bytes_max: int) -> bytes:
    """Decompress a message. Raises `BadMessage`."""
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
    """The error for a message over the limit."""
    hint = "Use --grpc-max-message-size to increase the limit."
    return BadMessage(RESOURCE_EXHAUSTED, f"Received {what}message larger than max ({size} vs. {most}). {hint}")
