"""gRPC's usual health service, by its bytes: one field in each message. Whatever is asked for, it is the server."""

import asyncio
from typing import Final

from forebay.modelserver.rpc.calls import DRAINING, Desk, Head, Link, Unary
from forebay.wire.http2.grpc import UNAVAILABLE, answer_head, framed
from forebay.wire.http2.streams import Stream

SERVICE: Final = "grpc.health.v1.Health"
WATCH_EVERY_S: Final = 1.0
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""HealthCheckResponse: field 1, the state."""


class Check(Unary):
    """The state now."""

    __slots__ = ()

    def on_message(self, message: bytes | memoryview) -> None:
        """Answer."""
        self.reply(state(self.desk))


class Watch(Unary):
    """The state now, and every other one later."""

    __slots__ = ("_looking", "_told")

    def __init__(self, desk: Desk, session: Link, stream: Stream, head: Head) -> None:
        super().__init__(desk, session, stream, head)
        self._told = b""
        self._looking: asyncio.TimerHandle | None = None

    def on_message(self, message: bytes | memoryview) -> None:
        """Begin to watch."""
        self.begun = True
        self.session.head(self.stream, answer_head())
        self._look()

    def _look(self) -> None:
        if self.over:
            return
        now = state(self.desk)
        if now != self._told:
            self._told = now
            self.session.send(self.stream, framed(now))
            self.session.wake()
        self._looking = self.desk.loop.call_later(WATCH_EVERY_S, self._look)

    def on_drain(self) -> None:
        """Tell the last state, and no more."""
        if self._told:
            self._look()
            self.refuse(UNAVAILABLE, DRAINING)
            self.on_gone()

    def on_gone(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()


def state(desk: Desk) -> bytes:
    """The message that tells the state."""
    return _SERVING if desk.models.ready else _NOT_SERVING
