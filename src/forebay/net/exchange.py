"""One complete HTTP request, and the ways to respond to it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from forebay.wire import http1

if TYPE_CHECKING:
    from forebay.net.connection import Connection

BODILESS: Final = frozenset({204, 304})
COPIED_BYTES_MAX: Final = 65_536
"""A larger body is written separately: copying it behind the head would cost more than a second write."""

_NO_HEADERS: Final[list[tuple[bytes, bytes]]] = []
_NO_FIELDS: Final[dict[bytes, bytes]] = {}


class Source(Protocol):
    """Produces a streamed response; paused while the client reads too slowly."""

    def pause(self) -> None:
        """Produce no more for now."""

    def resume(self) -> None:
        """Continue."""


class Exchange:
    """One complete request and the way to respond to it. Header names are lower-case.

    Every method is a no-op once `finished`: the response is complete or the client has disconnected.
    """

    __slots__ = (
        "_chunked",
        "_line",
        "body",
        "extra",
        "fields",
        "finished",
        "headers",
        "http_1_0",
        "keep_alive",
        "method",
        "on_disconnect",
        "placed",
        "source",
        "started",
        "target",
    )

    def __init__(
        self,
        line: "Connection",
        method: bytes,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        fields: dict[bytes, bytes],
    ) -> None:
        self._line = line
        self._chunked = False
        """Whether `write` sends chunks."""
        self.method = method
        self.target = target
        self.headers = headers
        self.fields = fields
        """The headers by name; the last one of repeated headers."""
        self.body = b""
        self.placed: memoryview | None = None
        """The body, if it was read into memory of the handler's choice; `body` is empty then."""
        self.extra = b""
        """Header lines added to the head of any response."""
        self.http_1_0 = False
        self.keep_alive = True
        self.started = False
        self.finished = False
        self.on_disconnect: Callable[[], None] | None = None
        self.source: Source | None = None
        """Paused while the client reads more slowly than we write."""

    @property
    def path(self) -> str:
        """The target up to the query."""
        return self.target.partition(b"?")[0].decode("latin-1")

    @property
    def query(self) -> str:
        """The target after the question mark, undecoded."""
        return self.target.partition(b"?")[2].decode("latin-1")

    @property
    def peer(self) -> str:
        """Address of the client."""
        return self._line.peer()

    @property
    def encrypted(self) -> bool:
        """Whether its connection uses TLS."""
        return self._line.encrypted()

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than we write."""
        return self._line.paused

    @property
    def cut(self) -> bool:
        """Whether the client was disconnected because it did not read in time."""
        return self._line.cut

    def header(self, name: bytes) -> bytes | None:
        """The value of a header by its lower-case name; the last one of repeated headers."""
        return self.fields.get(name)

    def respond(self, status: int, headers: http1.Headers, body: bytes) -> None:
        """Send a complete response."""
        if self.finished:
            return
        assert not self.started, "respond() after start()"
        self.started = True
        line = self._finish()
        if status in BODILESS:
            line.send(self._head(status, headers, b"\r\n"))
        elif self.method == b"HEAD":
            line.send(self._head(status, headers, b"content-length: %d\r\n\r\n" % len(body)))
        elif len(body) <= COPIED_BYTES_MAX:
            line.send(self._head(status, headers, b"content-length: %d\r\n\r\n%b" % (len(body), body)))
        else:
            line.send(self._head(status, headers, b"content-length: %d\r\n\r\n" % len(body)))
            line.put(body)
        line.answered(self.keep_alive)

    def start(self, status: int, headers: http1.Headers, first: bytes = b"") -> None:
        """Begin a response of unknown length; `first`, if not empty, is sent together with the head."""
        if self.finished:
            return
        assert not self.started, "start() twice"
        self.started = True
        if self.http_1_0:
            self.keep_alive = False
        self._chunked = not self.http_1_0 and self.method != b"HEAD"
        end = b"\r\n" if self.http_1_0 else b"transfer-encoding: chunked\r\n\r\n"
        if first and self._chunked:
            end += http1.chunk(first)
        elif self.http_1_0 and self.method != b"HEAD":
            end += first
        self._line.send(self._head(status, headers, end))

    def rest(self) -> None:
        """The response will take long: free what only the next request needs."""
        self._line.rest()

    def forget_head(self) -> None:
        """Free the heads of the request and the response, for a response that takes long."""
        self.headers = _NO_HEADERS
        self.fields = _NO_FIELDS
        self.extra = b""
        self._line.rest()

    def write(self, data: bytes) -> None:
        """Send a piece of the response."""
        if self._chunked and data:
            self._line.stream(http1.chunk(data))
        elif not self.finished and self.method != b"HEAD":
            self._line.stream(data)

    def end(self, trailers: http1.Headers = ()) -> None:
        """Complete the response. HTTP/1.0 has no trailers."""
        if self.finished:
            return
        line = self._finish()
        if not self.http_1_0 and self.method != b"HEAD":
            line.put(http1.last_chunk(trailers))
        line.answered(self.keep_alive)

    def abort(self) -> None:
        """Close the connection after what was written: the client sees that the response is incomplete."""
        if self.finished:
            return
        self._finish().answered(keep_alive=False)

    def gone(self) -> None:
        """The client has disconnected: call `on_disconnect`."""
        tell = self.on_disconnect
        if not self.finished:
            self._finish()
            if tell is not None:
                tell()

    def _finish(self) -> "Connection":
        self.finished = True
        self._chunked = False
        self.on_disconnect = self.source = None  # both hold their owner, which holds this exchange
        return self._line

    def _head(self, status: int, headers: http1.Headers, end: bytes) -> bytes:
        common = self._line.common
        if common.draining:
            self.keep_alive = False
        if not self.keep_alive:
            end = b"connection: close\r\n" + end
        elif self.http_1_0:
            end = b"connection: keep-alive\r\n" + end
        first = http1.STATUS_LINES.get(status) or http1.status_line(status)
        return b"%b%b%b%b%b" % (first, common.date, self.extra, http1.fields(headers), end)
