"""HTTP/2 frames (RFC 9113, section 4): their headers, and the small fixed ones."""

from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The connection preface of a client."""
HEAD_BYTES: Final = 9
FRAME_BYTES_MAX: Final = 16_384
"""Of a frame's payload: the size that every peer accepts, and the most that we accept."""
WINDOW_START: Final = 65_535
"""The initial flow-control window, in both directions, of every connection and, unless SETTINGS change it, stream."""
WINDOW_MAX: Final = 2**31 - 1
ID_MAX: Final = 2**31 - 1

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 1
ACK: Final = 1
END_HEADERS: Final = 4
PADDED: Final = 8
PRIORITISED: Final = 0x20

ENABLE_PUSH: Final = 2
STREAMS_MAX: Final = 3
WINDOW: Final = 4
FRAME_SIZE: Final = 5
HEADER_LIST: Final = 6

NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
COMPRESSION_ERROR: Final = 9
CALM_DOWN: Final = 11
"""ENHANCE_YOUR_CALM."""

HEAD: Final = Struct(">BHBBI")
"""Length (in two parts), type, flags, stream."""
U32: Final = Struct(">I")
SETTING: Final = Struct(">HI")


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """A complete frame."""
    size = len(body)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + body


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*each) for each in values.items()))


def goaway(last: int, code: int, text: bytes = b"") -> bytes:
    """A GOAWAY frame: streams up to `last` are still served."""
    return frame(GOAWAY, 0, 0, U32.pack(last) + U32.pack(code) + text)


class ProtocolViolation(Exception):  # noqa: N818 - states the condition
    """The client has violated the protocol. The connection ends with that error code."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


def check(fine: bool, code: int = PROTOCOL_ERROR) -> None:
    """Raise `ProtocolViolation` unless a frame is valid."""
    if not fine:
        raise ProtocolViolation(code, "a frame is not what it should be")


def unpadded(id: int, flags: int, body: bytes) -> bytes:
    """The header block of a HEADERS frame, without padding and priority. Raises `ProtocolViolation`."""
    start, end = 0, len(body)
    if flags & PADDED:
        start, end = 1, end - (body[0] if body else 0)
    if flags & PRIORITISED:
        if U32.unpack(body[start : start + 4].ljust(4, b"\0"))[0] & ID_MAX == id:
            raise ProtocolViolation(PROTOCOL_ERROR, "a stream depends on itself")
        start += 5
    if start > end:
        raise ProtocolViolation(PROTOCOL_ERROR, "a frame is all padding")
    return body[start:end]
