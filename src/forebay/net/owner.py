"""What a connection needs of its server, heads that were read before among it.

A client says the same in the head of every request, but for the length of its body. To read that field by field takes
a tenth of what a request costs, and most of what can be saved before it is sent on. So a request whose head was read
before, byte for byte with the digits of `content-length` cut out, is not parsed: what came of the head is known. The
parser stays the judge: only what it has taken for one whole message is kept.
"""

from typing import TYPE_CHECKING, Final, Protocol

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.exchange import Exchange
from forebay.net.outbox import NOBODYS, Outbox
from forebay.net.refusing import SMALL_BODY_BYTES

if TYPE_CHECKING:
    from forebay.net.connection import Connection

HEAD_BYTES_MAX: Final = 2048
"""Larger heads are read every time. A server that takes no larger ones reads all."""
KEPT_MAX: Final = 256
WRITE_BUFFER_BYTES: Final = 65_536
"""More than this unsent, and the writer is asked to pause. Said to the transport because TLS would take 512 KiB."""
LENGTH: Final = b"content-length"
_LINES: Final = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")


class Head:
    """What came of a head, for any length of the body."""

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
    """Some that were read lately."""

    __slots__ = ("_kept", "_new", "_size_max")

    def __init__(self, header_bytes_max: int, body_bytes_max: int) -> None:
        self._kept: dict[bytes, Head] = {}
        self._new = b""
        self._size_max = min(SMALL_BODY_BYTES, body_bytes_max) if header_bytes_max > HEAD_BYTES_MAX else -1

    def read(self, line: "Connection", data: bytes) -> Exchange | None:
        """The request, if these bytes are a whole one with a known head."""
        self._new = b""
        end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        size = len(data) - end - 4
        if end < 0 or size > self._size_max:
            return None
        at = data.find(_LINES[0], 0, end)
        if at < 0:
            at = data.find(_LINES[1], 0, end)
            if at < 0:
                return None
        at += len(_LINES[0])
        stop = data.find(b"\r\n", at, end + 2)
        digits = data[at:stop]
        if digits != b"%d" % size:
            return None
        key = data[:at] + data[stop:end]
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

    def keep(self, exchange: Exchange) -> None:
        """Remember the head of a request that was just not known, and turned out to be one."""
        key, self._new = self._new, b""
        if key and len(exchange.headers) == len(exchange.fields):
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[key] = Head(exchange)


class Common:
    """What all connections of a server look at, many times for every request: so this is no protocol."""

    __slots__ = (
        "alive_for",
        "bodies_bytes",
        "date",
        "draining",
        "heads",
        "idle_timeout_s",
        "limits",
        "now",
        "outbox",
    )

    def __init__(self, limits: Limits, alive_for: bytes = b"", outbox: Outbox | None = None) -> None:
        self.limits = limits
        self.idle_timeout_s = limits.idle_timeout_s
        self.now = 0.0
        """Coarse: it moves once per sweep."""
        self.date = b""
        """The line of the head that says it."""
        self.draining = False
        """Connections close after their answer."""
        self.bodies_bytes = 0
        """How many bytes the large bodies have together that are being read, as far as they say so."""
        self.alive_for = alive_for
        """Requests with this header are told with a 102 now and then that they are not forgotten; empty: none are."""
        self.outbox = outbox or NOBODYS
        self.heads = Heads(limits.header_bytes_max, limits.body_bytes_max)


class Owner(Protocol):
    """What a connection needs of its server."""

    common: Common

    def opened(self, connection: "Connection") -> bool:
        """Take the connection in; False when there are too many."""

    def closed(self, connection: "Connection") -> None:
        """Forget the connection."""

    def wants_body(self, exchange: Exchange) -> bool:
        """Whether `handle` needs the rest of a request of which the head is there; if not, it gets it without."""

    def handle(self, exchange: Exchange) -> None:
        """Answer the exchange, now or later."""

    def refused(self, code: Code) -> None:
        """Note that bytes that never became an exchange were answered with an error."""

    def named(self, seen: Exchange, code: Code) -> bytes:
        """The id that the answer to such bytes is to carry, and be found by; empty: none. `seen` is what was read of
        a head, without a method, and cannot be answered.
        """
