"""Streams of an HTTP/2 connection: their state, and the interface of their handlers."""

from collections import deque
from typing import Final, Protocol

from forebay.wire.http2.frames import FLOW_CONTROL_ERROR, PROTOCOL_ERROR

CUT_MAX: Final = 256
"""How many recently ended streams of a connection are remembered."""


class StreamHandler(Protocol):
    """Handles what arrives on a stream."""

    def on_data(self, data: bytes | memoryview, ended: bool) -> None:
        """Bytes of the request, possibly none; `ended` with the last."""

    def on_reset(self) -> None:
        """The stream was reset; no response is wanted. Nothing is called after this."""


class Stream:
    """An open stream: it is closed when both sides have ended it, or either has reset it."""

    __slots__ = (
        "ended",
        "handler",
        "held",
        "id",
        "left",
        "queue",
        "queued_bytes",
        "room",
        "tail",
        "unread",
        "window",
    )

    def __init__(self, id: int, window: int, room: int, ended: bool) -> None:
        self.id = id
        self.window = window
        """Bytes that the client still accepts; SETTINGS may make it negative."""
        self.room = room
        """Bytes that we still accept from the client."""
        self.ended = ended
        """The client has sent everything."""
        self.left = -1
        """Remaining bytes of the request, by its content-length; -1: not given."""
        self.held = False
        """The handler cannot accept more for now: the client's window stays closed until `release`."""
        self.unread = 0
        """Bytes received for which the window has not been reopened yet."""
        self.queue: deque[memoryview] = deque()
        """Bytes that wait for the client's window."""
        self.queued_bytes = 0
        self.tail: bytes | None = None
        """Trailers to be sent after them."""
        self.handler: StreamHandler | None = None
        """None: there is no handler to notify."""

    def count(self, size: int, content: int, ended: bool) -> int:
        """Account for a DATA frame of `size` bytes, padding included; returns the error code, or 0 if it is valid."""
        self.room -= size
        self.unread += size
        if self.room < 0:
            return FLOW_CONTROL_ERROR
        if self.left >= 0:
            self.left -= content
            if self.left < 0 or (ended and self.left):
                return PROTOCOL_ERROR
        self.ended = ended
        return 0


class EndedStreams:
    """Streams that we ended before the client did: frames that it sent meanwhile may still arrive."""

    __slots__ = ("_forgotten", "_ids")

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}
        self._forgotten = 0
        """Up to this id, ended streams have been forgotten: any frame may arrive on them."""

    def add(self, id: int) -> None:
        """Record a stream that we have ended."""
        self._ids[id] = None
        if len(self._ids) > CUT_MAX:
            oldest = next(iter(self._ids))
            del self._ids[oldest]
            self._forgotten = max(self._forgotten, oldest)

    def expects(self, id: int, ended: bool) -> bool:
        """Whether a frame may arrive on a stream that is not open; `ended`: it is the client's last."""
        if id not in self._ids:
            return id <= self._forgotten
        if ended:
            del self._ids[id]
        return True
