"""One request of a client, who hears of its answer, and why there may be none."""

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
    """Why there is no complete answer. `sent`: the upstream may have begun to work on the request."""

    kind: Literal["connect", "lost", "protocol"]
    sent: bool
    text: str


class Sink(Protocol):
    """Receives an answer: one head, bodies, then exactly one of `on_end` and `on_error`; nothing after a cancel."""

    def on_head(self, status: int, headers: list[Header]) -> None:
        """The final status (1xx are dropped); header names are lower-case."""

    def on_body(self, data: bytes) -> None:
        """A piece of the body, without its framing."""

    def on_end(self, trailers: list[Header]) -> None:
        """The answer is complete."""

    def on_error(self, error: CallError) -> None:
        """The answer will not come, or not to its end."""


class Call:
    """One request on its way; the pool may try it on two connections."""

    __slots__ = ("_pool", "connection", "reads", "request", "sent", "sink")

    def __init__(self, pool: "Pool", request: bytes, sink: Sink) -> None:
        self._pool = pool
        self.reads = True  # the upstream is not held back
        self.request = request
        self.sink: Sink | None = sink
        self.connection: Upstream | None = None
        self.sent = False

    def cancel(self) -> None:
        """Close the connection, so that the upstream stops working on it. Nothing more reaches the sink."""
        self.sink = None
        connection = self.connection
        if connection is not None:
            self.connection = None
            connection.drop()

    def pause(self) -> None:
        """Stop reading: the upstream feels the back-pressure."""
        if self.reads and self.connection is not None:
            self.reads = False
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        connection = self.connection
        if not self.reads and connection is not None:
            self.reads = True
            connection.read_on(self)
            if self.reads:
                connection.transport.resume_reading()

    def run_on(self, connection: "Upstream") -> None:
        """Send the request on a connection."""
        self.connection = connection
        self.sent = True
        connection.run(self)

    def end(self, trailers: list[Header]) -> None:
        """Hand the end on."""
        sink, self.sink, self.connection = self.sink, None, None
        if sink is not None:
            try:
                sink.on_end(trailers)
            except Exception as mistake:  # supervisor: as in `data_received`
                tell(mistake)
                _fail(sink, CallError("protocol", True, MISTAKE))

    def fail(self, kind: Literal["connect", "lost", "protocol"], text: str) -> None:
        """Hand an error on."""
        sink, self.sink, self.connection = self.sink, None, None
        if sink is not None:
            _fail(sink, CallError(kind, self.sent, text))


def _fail(sink: Sink, error: CallError) -> None:
    try:
        sink.on_error(error)
    except Exception as mistake:  # supervisor: what calls may be the task group of the whole process
        tell(mistake)


def tell(mistake: Exception) -> None:
    """Note a mistake of ours that costs one answer."""
    asyncio.get_running_loop().call_exception_handler({"message": "handling an answer failed", "exception": mistake})


def because(error: Exception | None) -> str:
    """The end of a sentence that says what went wrong."""
    return f": {error}" if error else ""
