"""In which order the event loop's work is done: what somebody waits for first, and what is to be sent together.

A write wakes who is to read it. Sent one by one, with other work in between, each of many wakes its reader anew, who
finds one piece and goes to sleep again: at a reader on the same machine that is a fifth of what a request costs. So
connections collect what they send, and it leaves at the end of the round. Only what somebody waits for, a request or
the beginning of an answer, goes at once as long as there is little of it.

What comes in the middle of a stream has time, too: where dozens of streams have an event each, a request that is read
after them would wait until they all are sent on. They are, a few at a time, when nothing more urgent can be read.
"""

import asyncio
from collections import deque
from typing import Final

AT_ONCE: Final = 4
"""As long as no round, or millisecond, has more writes that somebody waits for, these go at once."""
LATELY_S: Final = 0.02
"""A round that was longer ago tells nothing of this one."""
SOME: Final = 2
"""So many pieces of streams are handed on before it is looked again for what is more urgent; of many a quarter."""
TOGETHER: Final = 64
"""What so many pieces have made leaves, even if there are more of them."""
JOINED_BYTES_MAX: Final = 65_536
"""More than this is not collected: putting it together would cost more than a second write."""


class Sender:
    """A connection, as far as it writes. Who closes the transport lets go before what was put."""

    __slots__ = ("_leaving", "_outbox", "transport")

    def __init__(self, outbox: "Outbox") -> None:
        self.transport: asyncio.Transport
        self._outbox = outbox
        self._leaving = b""

    def put(self, data: bytes) -> None:
        """Write at the end of this round."""
        leaving = self._leaving
        if len(leaving) + len(data) > JOINED_BYTES_MAX:
            self.leave()
            self.transport.write(data)
            return
        self._leaving = leaving + data if leaving else data
        if not leaving:
            self._outbox.add(self)

    def send(self, data: bytes) -> None:
        """Write at once, unless there is much of that."""
        if self._leaving or self._outbox.crowded():
            self.put(data)
        else:
            self.transport.write(data)

    def leave(self) -> None:
        """Write what was put."""
        data, self._leaving = self._leaving, b""
        if data:
            self.transport.write(data)

    def go_on(self) -> None:
        """Take what it has put aside."""
        raise NotImplementedError


class Outbox:
    """Who has something to do later in this round. Without a loop everything is done as it comes."""

    __slots__ = ("_behind", "_crowd", "_due", "_gone_on", "_now", "_senders", "_sent", "_soon", "_time")

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._soon = loop.call_soon if loop is not None else None
        self._time = loop.time if loop is not None else _never
        self._senders: list[Sender] = []
        self._behind: deque[Sender] = deque()
        self._due = False
        self._gone_on = 0
        self._now = 0.0
        self._sent = 0
        self._crowd = False

    def add(self, sender: Sender) -> None:
        """Have a sender leave at the end of the round."""
        if self._soon is None:
            sender.leave()
            return
        self._senders.append(sender)
        if not self._due:
            self._later()

    def put_aside(self, sender: Sender) -> None:
        """Have one go on when nothing is more urgent."""
        if self._soon is None:
            sender.go_on()
            return
        self._behind.append(sender)
        if not self._due:
            self._later()

    def _later(self) -> None:
        assert self._soon is not None
        self._due = True
        self._soon(self._end_round)

    def crowded(self) -> bool:
        """Count a write that somebody waits for, and tell whether it should wait for the end of the round."""
        now = self._time()  # of uvloop: that of the round, in milliseconds
        if now != self._now:
            self._crowd = self._sent > AT_ONCE and now - self._now < LATELY_S
            self._now = now
            self._sent = 0
        self._sent += 1
        return self._crowd or self._sent > AT_ONCE

    def _end_round(self) -> None:
        behind = self._behind
        self._due = True
        try:
            some = min(len(behind), max(SOME, len(behind) // 4))
            for _ in range(some):
                sender = behind.popleft()
                try:
                    sender.go_on()
                except Exception as error:  # supervisor: a mistake with one connection costs that one
                    _drop(sender, error)
            self._gone_on += some
            if not behind or self._gone_on >= TOGETHER:
                self._leave()
        finally:
            self._due = False
        if behind or self._senders:
            self._later()

    def _leave(self) -> None:
        self._gone_on = 0
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


NOBODYS: Final = Outbox(None)
"""Of connections that no loop serves."""
