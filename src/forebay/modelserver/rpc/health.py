"""gRPC's health service, encoded by hand: each message has one field. The service name in requests is ignored."""

import asyncio
from typing import Final

from forebay.modelserver.rpc.calls import DRAINING, Head, Link, RpcContext, Unary
from forebay.wire.http2.grpc import UNAVAILABLE, answer_head, framed
from forebay.wire.http2.streams import Stream

SERVICE: Final = "grpc.health.v1.Health"
WATCH_EVERY_S: Final = 1.0
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""HealthCheckResponse: field 1, the state."""


class Check(Unary):
    """Reports the current state."""

    __slots__ = ()

    def on_message(self, message: bytes | memoryview) -> None:
        """Answer."""
        self.reply(state(self.context))


class Watch(Unary):
    """Reports the current state and every change."""

    __slots__ = ("_looking", "_told")

    def __init__(self, context: RpcContext, session: Link, stream: Stream, head: Head) -> None:
        super().__init__(context, session, stream, head)
        self._told = b""
        self._looking: asyncio.TimerHandle | None = None

    def on_message(self, message: bytes | memoryview) -> None:
        """Start watching."""
        self.begun = True
        self.session.head(self.stream, answer_head())
        self._look()
        if self.context.draining:
            self.on_drain()

    def _look(self) -> None:
        if self.over:
            return
        now = state(self.context)
        if now != self._told:
            self._told = now
            self.session.send(self.stream, framed(now))
            self.session.wake()
        self._looking = self.context.loop.call_later(WATCH_EVERY_S, self._look)

    def on_drain(self) -> None:
        """Send the last state and end."""
        if self._told:
            self._look()
            self.refuse(UNAVAILABLE, DRAINING)
            self.on_gone()

    def on_gone(self) -> None:
        """Stop watching."""
        if self._looking is not None:
            self._looking.cancel()


def state(context: RpcContext) -> bytes:
    """HealthCheckResponse with the current state."""
    return _SERVING if context.models.ready else _NOT_SERVING
