"""Streams of an HTTP/2 connection: what is known of each, and who is told of what comes on it."""

from collections import deque
from typing import Final, Protocol

from forebay.wire.http2.frames import FLOW_CONTROL_ERROR, PROTOCOL_ERROR

CUT_MAX: Final = 256
"""Streams of a connection that are remembered for what may still come on them."""


class Taker(Protocol):
    """Who serves a stream."""

    def on_data(self, data: bytes | memoryview, ended: bool) -> None:
        """Bytes of the request, which may be none; `ended` with the last."""

    def on_reset(self) -> None:
        """Nobody waits for the answer any more. Nothing is called after this."""


class Stream:
    """A stream that is open: it is over when both sides have ended, or either has reset it."""

    __slots__ = ("ended", "held", "id", "left", "queue", "queued_bytes", "room", "tail", "taker", "unread", "window")

    def __init__(self, id: int, window: int, room: int, ended: bool) -> None:
        self.id = id
        self.window = window
        """Bytes that the client lets us send; settings may make it negative."""
        self.room = room
        """Bytes that we still let the client send."""
        self.ended = ended
        """The client has sent everything."""
        self.left = -1
        """Bytes of the request that are still to come, if its headers say how many there are; -1: they do not."""
        self.held = False
        """Whoever serves the stream has enough for now: the client gets no room for more until it is released."""
        self.unread = 0
        """Bytes that have come and for which the client has no new room yet."""
        self.queue: deque[memoryview] = deque()
        """Bytes that wait until the client lets us send them."""
        self.queued_bytes = 0
        self.tail: bytes | None = None
        """Trailers that wait behind them."""
        self.taker: Taker | None = None
        """None: nobody is to be told."""

    def count(self, size: int, content: int, ended: bool) -> int:
        """Take note of a frame of data of `size` bytes, padding included; the code of what is wrong with it, or 0."""
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


class Cut:
    """Streams that we have ended before their client did: what it has sent meanwhile is still on its way to us."""

    __slots__ = ("_forgotten", "_ids")

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}
        self._forgotten = 0
        """Of those up to this one nothing is known: anything may come on them."""

    def add(self, id: int) -> None:
        """We have ended a stream."""
        self._ids[id] = None
        if len(self._ids) > CUT_MAX:
            oldest = next(iter(self._ids))
            del self._ids[oldest]
            self._forgotten = max(self._forgotten, oldest)

    def expects(self, id: int, ended: bool) -> bool:
        """Whether a frame may come on a stream that is not open; `ended`: it is the client's last."""
        if id not in self._ids:
            return id <= self._forgotten
        if ended:
            del self._ids[id]
        return True
