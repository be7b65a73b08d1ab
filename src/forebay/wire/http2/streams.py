"""Streams of an HTTP/2 connection: what is known of each, and who is told of what comes on it."""

from collections import deque
from typing import Protocol


class Taker(Protocol):
    """Who serves a stream."""

    def on_data(self, data: bytes | memoryview, ended: bool) -> None:
        """Bytes of the request, which may be none; `ended` with the last."""

    def on_reset(self) -> None:
        """Nobody waits for the answer any more. Nothing is called after this."""


class Stream:
    """A stream that is open: it is over when both sides have ended, or either has reset it."""

    __slots__ = ("ended", "held", "id", "queue", "queued_bytes", "room", "tail", "taker", "unread", "window")

    def __init__(self, id: int, window: int, room: int, ended: bool) -> None:
        self.id = id
        self.window = window
        """Bytes that the client lets us send; settings may make it negative."""
        self.room = room
        """Bytes that we still let the client send."""
        self.ended = ended
        """The client has sent everything."""
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
