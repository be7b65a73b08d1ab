"""One upstream request: its sink, its cancellation and back-pressure, and its errors."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

if TYPE_CHECKING:
    from forebay.net.client.pool import Pool
    from forebay.net.client.upstream import Upstream

Header = tuple[bytes, bytes]

MISTAKE: Final = "The answer could not be handled."


@dataclass(frozen=True, slots=True)
class CallError:
    """Why there is no complete response. `sent`: the upstream may have started to process the request."""

    kind: Literal["connect", "lost", "protocol"]
    sent: bool
    text: str
    ours: bool = False
    """This process or machine had no room for a connection, which says nothing about the upstream."""


class Sink(Protocol):
    """Receives a response: one head, body pieces, then exactly one of `on_end` and `on_error`; nothing after a
    cancel."""

    def on_head(self, status: int, headers: list[Header]) -> None:
        """The final status (1xx are dropped); header names are lower-case."""

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without its chunk framing."""

    def on_end(self, trailers: list[Header]) -> None:
        """The response is complete."""

    def on_error(self, error: CallError) -> None:
        """The response failed, before its head or before its end."""


class Call:
    """One request in flight; the pool may try it on two connections, unless it is to be sent `once`."""

    __slots__ = ("_pool", "connection", "once", "reads", "request", "sent", "sink")

    def __init__(self, pool: "Pool", request: bytes, sink: Sink, *, once: bool = False) -> None:
        self._pool = pool
        self.once = once
        self.reads = True  # not paused by `pause`
        self.request = request
        self.sink: Sink | None = sink
        self.connection: Upstream | None = None
        self.sent = False

    def cancel(self) -> None:
        """Close the connection, so that the upstream stops working on the request. The sink is not called any
        more."""
        self.sink = None
        connection = self.connection
        if connection is not None:
            self.connection = None
            connection.drop()

    def pause(self) -> None:
        """Stop reading, so that back-pressure reaches the upstream."""
        if self.reads and self.connection is not None:
            self.reads = False
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        """Resume reading, beginning with what was buffered while paused."""
        connection = self.connection
        if not self.reads and connection is not None:
            self.reads = True
            connection.resume(self)
            if self.reads:
                connection.transport.resume_reading()

    def run_on(self, connection: "Upstream") -> None:
        """Send the request on a connection."""
        self.connection = connection
        self.sent = True
        connection.run(self)

    def end(self, trailers: list[Header]) -> None:
        """Complete the call and notify the sink."""
        sink, self.sink, self.connection = self.sink, None, None
        if sink is not None:
            try:
                sink.on_end(trailers)
            except Exception as mistake:  # supervisor: as in `data_received`
                report(mistake)
                _fail(sink, CallError("protocol", True, MISTAKE))

    def fail(self, kind: Literal["connect", "lost", "protocol"], text: str, ours: bool = False) -> None:
        """Fail the call and notify the sink."""
        sink, self.sink, self.connection = self.sink, None, None
        if sink is not None:
            _fail(sink, CallError(kind, self.sent, text, ours))


def _fail(sink: Sink, error: CallError) -> None:
    try:
        sink.on_error(error)
    except Exception as mistake:  # supervisor: the caller may be the task group of the whole process
        report(mistake)


def report(mistake: Exception) -> None:
    """Report an exception in a sink to the loop's exception handler; it costs one response."""
    asyncio.get_running_loop().call_exception_handler({"message": "handling an answer failed", "exception": mistake})


def because(error: Exception | None) -> str:
    """The cause of an error as the end of a sentence; empty if there is none."""
    return f": {error}" if error else ""
