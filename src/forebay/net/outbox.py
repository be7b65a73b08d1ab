"""Ordering of work within a loop iteration: urgent writes first, other writes batched, stream data deferred.

Each write wakes its reader. Writes sent one by one, with other work in between, wake the reader each time for a
single piece: for a reader on the same machine that is a fifth of the cost of a request. So connections collect what
they send until the end of the iteration. Only urgent writes (a request, the head of a response) go at once, as long
as there are few of them.

Data from the middle of a stream can wait, too: with dozens of streams each receiving an event, a request read after
them would wait until all have been passed on. They are processed a few at a time, when nothing more urgent can be
read.
"""

import asyncio
from collections import deque
from typing import Final

AT_ONCE: Final = 4
"""Up to this many urgent writes per iteration (or millisecond) are sent at once."""
LATELY_S: Final = 0.02
"""An earlier iteration's load says nothing about this one if it was longer ago."""
SOME: Final = 2
"""How many deferred stream reads are processed before polling for more urgent work; at least a quarter of them."""
TOGETHER: Final = 64
"""Collected writes are flushed after this many deferred reads, even if there are more."""
JOINED_BYTES_MAX: Final = 65_536
"""Larger writes are not collected: joining them would cost more than a second write."""


class Sender:
    """The sending half of a connection. Call `leave` before closing the transport, or collected writes are lost."""

    __slots__ = ("_leaving", "_outbox", "transport")

    def __init__(self, outbox: "Outbox") -> None:
        self.transport: asyncio.Transport
        self._outbox = outbox
        self._leaving = b""

    def put(self, data: bytes) -> None:
        """Write at the end of this iteration."""
        leaving = self._leaving
        if len(leaving) + len(data) > JOINED_BYTES_MAX:
            self.leave()
            self.transport.write(data)
            return
        self._leaving = leaving + data if leaving else data
        if not leaving:
            self._outbox.add(self)

    def send(self, data: bytes) -> None:
        """Write at once, unless many others do."""
        if self._leaving or self._outbox.crowded():
            self.put(data)
        else:
            self.transport.write(data)

    def leave(self) -> None:
        """Flush the collected writes."""
        data, self._leaving = self._leaving, b""
        if data:
            self.transport.write(data)

    def process_deferred(self) -> None:
        """Process the data it has deferred."""
        raise NotImplementedError


class Outbox:
    """Runs deferred writes and reads at the end of a loop iteration. Without a loop, everything is done at once."""

    __slots__ = ("_crowd", "_deferred", "_deferred_done", "_due", "_now", "_senders", "_sent", "_soon", "_time")

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._soon = loop.call_soon if loop is not None else None
        self._time = loop.time if loop is not None else _never
        self._senders: list[Sender] = []
        self._deferred: deque[Sender] = deque()
        self._due = False
        self._deferred_done = 0
        self._now = 0.0
        self._sent = 0
        self._crowd = False

    def add(self, sender: Sender) -> None:
        """Flush a sender at the end of the iteration."""
        if self._soon is None:
            sender.leave()
            return
        self._senders.append(sender)
        if not self._due:
            self._later()

    def defer(self, sender: Sender) -> None:
        """Have a sender process its deferred data when nothing is more urgent."""
        if self._soon is None:
            sender.process_deferred()
            return
        self._deferred.append(sender)
        if not self._due:
            self._later()

    def _later(self) -> None:
        assert self._soon is not None
        self._due = True
        self._soon(self._end_round)

    def crowded(self) -> bool:
        """Count an urgent write. True if it should wait for the end of the iteration."""
        now = self._time()  # uvloop's: of the iteration, in whole milliseconds
        if now != self._now:
            self._crowd = self._sent > AT_ONCE and now - self._now < LATELY_S
            self._now = now
            self._sent = 0
        self._sent += 1
        return self._crowd or self._sent > AT_ONCE

    def _end_round(self) -> None:
        behind = self._deferred
        self._due = True
        try:
            some = min(len(behind), max(SOME, len(behind) // 4))
            for _ in range(some):
                sender = behind.popleft()
                try:
                    sender.process_deferred()
                except Exception as error:  # supervisor: an exception in one connection closes that one only
                    _drop(sender, error)
            self._deferred_done += some
            if not behind or self._deferred_done >= TOGETHER:
                self._leave()
        finally:
            self._due = False
        if behind or self._senders:
            self._later()

    def _leave(self) -> None:
        self._deferred_done = 0
        senders, self._senders = self._senders, []
        for sender in senders:
            try:
                sender.leave()
            except Exception as error:  # supervisor: the same
                _drop(sender, error)


def _drop(sender: Sender, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": "a connection failed", "exception": error})
    sender.transport.abort()


def _never() -> float:
    return 0.0


UNBATCHED: Final = Outbox(None)
"""Sends and processes everything at once, for connections that share no loop's outbox."""
