"""What a connection needs from its server, including a cache of parsed request heads.

A client sends the same head with every request, except for the length of its body. Parsing it field by field takes a
tenth of the cost of a request, and most of what can be saved before it is forwarded. So a request whose head was
parsed before, byte for byte without the digits of `content-length`, is not parsed again: the parsed head is reused.
The parser stays authoritative: only heads that it accepted as part of one complete message are cached.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.exchange import Exchange
from forebay.net.outbox import UNBATCHED, Outbox
from forebay.net.reading.refusing import SMALL_BODY_BYTES

if TYPE_CHECKING:
    from forebay.net.connection import Connection

HEAD_BYTES_MAX: Final = 2048
"""Larger heads are always parsed, and so are all heads of a server whose limit is not above this."""
HEAD_ROOM_BYTES: Final = 8192
KEPT_MAX: Final = 256
WRITE_BUFFER_BYTES: Final = 65_536
"""With more unsent data than this, the writer is paused. Set on the transport because TLS would default to 512
KiB."""
LENGTH: Final = b"content-length"
_LINES: Final = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")


class Head:
    """A parsed request head, for any length of the body."""

    __slots__ = ("at", "fields", "headers", "http_1_0", "keep_alive", "method", "target")

    def __init__(self, exchange: Exchange) -> None:
        self.method = exchange.method
        self.target = exchange.target
        self.headers = exchange.headers
        self.fields = exchange.fields
        self.http_1_0 = exchange.http_1_0
        self.keep_alive = exchange.keep_alive
        self.at = [name for name, _ in exchange.headers].index(LENGTH)


class Heads:
    """Cache of parsed request heads."""

    __slots__ = ("_at", "_kept", "_new", "_size_max")

    def __init__(self, header_bytes_max: int, body_bytes_max: int) -> None:
        self._kept: dict[bytes, Head] = {}
        self._new = b""
        self._at = 0
        """Where the last request's `content-length` line was: looking there first saves most searches."""
        self._size_max = min(SMALL_BODY_BYTES, body_bytes_max) if header_bytes_max > HEAD_BYTES_MAX else -1

    def read(self, line: "Connection", data: bytes) -> Exchange | None:
        """The request, if the data is exactly one request with a cached head."""
        self._new = b""
        end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        size = len(data) - end - 4
        if end < 0 or size > self._size_max:
            return None
        at = self._at
        stop = at + len(_LINES[0])
        name = data[at:stop]
        if stop > end or (name != _LINES[0] and name != _LINES[1]):
            at = data.find(_LINES[0], 0, end)
            if at < 0:
                at = data.find(_LINES[1], 0, end)
                if at < 0:
                    return None
            self._at, stop = at, at + len(_LINES[0])
        digits = b"%d" % size
        rest = stop + len(digits)
        if data[stop : rest + 2] != digits + b"\r\n":
            return None
        key = data[:stop] + data[rest:end]
        head = self._kept.get(key)
        if head is None:
            self._new = key
            return None
        headers = head.headers.copy()
        headers[head.at] = (LENGTH, digits)
        fields = head.fields.copy()
        fields[LENGTH] = digits
        exchange = Exchange(line, head.method, head.target, headers, fields)
        exchange.http_1_0 = head.http_1_0
        exchange.keep_alive = head.keep_alive
        exchange.body = data[end + 4 :]
        return exchange

    def keep(self, exchange: Exchange | None) -> None:
        """Cache the head of a request that `read` has just missed and the parser accepted; None: it did not."""
        key, self._new = self._new, b""
        if key and exchange is not None and len(exchange.headers) == len(exchange.fields):
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[key] = Head(exchange)


Place = Callable[[Exchange, int], memoryview | None]
"""Memory for a large body of that size, asked for when the head is there; None: it becomes the exchange's `body`."""


class Common:
    """State shared by all connections of a server. Read many times per request: hence a native class, not a
    protocol."""

    __slots__ = (
        "alive_for",
        "bodies_bytes",
        "date",
        "draining",
        "head_room",
        "heads",
        "idle_timeout_s",
        "limits",
        "now",
        "outbox",
        "place",
    )

    def __init__(
        self, limits: Limits, alive_for: bytes = b"", outbox: Outbox | None = None, place: Place | None = None
    ) -> None:
        self.limits = limits
        self.idle_timeout_s = limits.idle_timeout_s
        self.now = 0.0
        """The loop's time, updated once per sweep."""
        self.date = b""
        """The `date` header line."""
        self.draining = False
        """Connections close after their current response."""
        self.bodies_bytes = 0
        """Total bytes reserved for the large bodies being read: their declared size, or the limit if they are
        chunked."""
        self.alive_for = alive_for
        """Requests with this header get a 102 now and then while they wait; empty: none do."""
        self.outbox = outbox or UNBATCHED
        self.place = place
        self.head_room = memoryview(bytearray(HEAD_ROOM_BYTES if place is not None else 0))
        """Where heads are read to on connections that have brought large bodies."""
        self.heads = Heads(limits.header_bytes_max, limits.body_bytes_max)


class Owner(Protocol):
    """What a connection needs from its server."""

    common: Common

    def opened(self, connection: "Connection") -> bool:
        """Register the connection; False when there are too many."""

    def closed(self, connection: "Connection") -> None:
        """Remove the connection."""

    def wants_body(self, exchange: Exchange) -> bool:
        """Whether `handle` needs the body of a request whose head has arrived; if not, it gets the request without
        it."""

    def handle(self, exchange: Exchange) -> None:
        """Respond to the exchange, now or later."""

    def refused(self, code: Code) -> None:
        """Record that bytes which never became an exchange were answered with this error."""

    def refusal_id(self, seen: Exchange, code: Code) -> bytes:
        """The request id for the response to such bytes, under which it is logged; empty: none. `seen` holds what was
        parsed of the head, without a method, and cannot be responded to; header lines in its `extra` are added."""
