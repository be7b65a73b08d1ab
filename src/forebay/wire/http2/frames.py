"""Frames of HTTP/2 (RFC 9113, section 4): their heads, and the small ones that are always the same."""

from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends first."""
HEAD_BYTES: Final = 9
FRAME_BYTES_MAX: Final = 16_384
"""Of a frame's body: what every peer takes, and all that we take."""
WINDOW_START: Final = 65_535
"""Flow control begins with this, both ways, on every connection and, unless settings say otherwise, stream."""
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
    """A whole frame."""
    size = len(body)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + body


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*each) for each in values.items()))


def goodbye(last: int, code: int, text: bytes = b"") -> bytes:
    """GOAWAY: streams up to `last` are served."""
    return frame(GOAWAY, 0, 0, U32.pack(last) + U32.pack(code) + text)


class Broken(Exception):  # noqa: N818 - states the condition
    """The client has left the protocol. The connection ends with that code."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


def check(fine: bool, code: int = PROTOCOL_ERROR) -> None:
    """Raise `Broken` unless a frame is what it should be."""
    if not fine:
        raise Broken(code, "a frame is not what it should be")


def unpadded(id: int, flags: int, body: bytes) -> bytes:
    """The block of a HEADERS frame of that stream, without padding and priority. Raises `Broken`."""
    start, end = 0, len(body)
    if flags & PADDED:
        start, end = 1, end - (body[0] if body else 0)
    if flags & PRIORITISED:
        if U32.unpack(body[start : start + 4].ljust(4, b"\0"))[0] & ID_MAX == id:
            raise Broken(PROTOCOL_ERROR, "a stream depends on itself")
        start += 5
    if start > end:
        raise Broken(PROTOCOL_ERROR, "a frame is all padding")
    return body[start:end]
