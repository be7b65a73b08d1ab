"""The receiving half of a connection: parses its bytes into requests, within limits.

The parser calls back into the connection itself. What is malformed or too large becomes the connection's refusal.
"""

import asyncio
from typing import TYPE_CHECKING, Final, cast

import httptools

from forebay.core.errors import TABLE, Code, Refusal
from forebay.net.exchange import Exchange
from forebay.net.outbox import Sender
from forebay.net.owner import HEAD_BYTES_MAX, Owner
from forebay.net.reading.arriving import Intake
from forebay.net.reading.refusing import SMALL_BODY_BYTES, Stop, head_flaw, target_in
from forebay.wire import http1

if TYPE_CHECKING:
    from forebay.net.connection import Connection

IDLE: Final = 0  # separate assignments: only then does mypyc compile them as constants
HEAD: Final = 1
BODY: Final = 2
LINGER: Final = 3
CLOSED: Final = 4
"""Phases of a connection: between requests, in a head, in a body, discarding what still arrives, closed."""
HTTP_2: Final = b"PRI * HTTP/2"
"""What a client that expects HTTP/2 sends first (RFC 9113, 3.4)."""
BLANK: Final = 0x20


class Reader(Sender):
    """Reads the requests of a connection into `_queue`; `Connection` answers them."""

    __slots__ = (
        "_body", "_body_bytes", "_exchange", "_fed", "_fields", "_headers", "_intake", "_parser", "_phase",
        "_priming", "_progress", "_queue", "_raw", "_refusal", "_room", "_since", "_target", "_undecided", "_until",
        "common", "owner",
    )  # fmt: skip

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner.common.outbox)
        self.owner = owner
        self.common = owner.common
        self._parser: httptools.HttpRequestParser | None = None
        self._phase = IDLE
        self._since = owner.common.now
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._fields: dict[bytes, bytes] | None = None
        self._body: list[bytes] | None = None
        self._intake: Intake | None = None
        self._body_bytes = 0
        self._room = 0
        self._exchange: Exchange | None = None
        self._queue: list[Exchange] = []
        self._refusal: Refusal | None = None
        self._undecided = False
        self._progress = False
        self._priming = False
        self._raw = 0
        self._fed = 0
        self._until = 0.0

    def _feed(self, data: bytes) -> None:
        """Parse what was received: whole requests are queued; what is wrong becomes the refusal."""
        fresh, queued = self._phase == IDLE, len(self._queue)
        if fresh:
            known = self.common.heads.read(cast("Connection", self), data)
            if known is not None:
                self._since = self.common.now
                self._queue.append(known)
                return
            self._begin()
            if len(data) > SMALL_BODY_BYTES and self.common.place is not None and not queued:
                data = self._feed_head(data)
                if not data:
                    return
        self._parse(data)
        if fresh:  # after an upgrade, others are queued before it
            self.common.heads.keep(self._queue[-1] if len(self._queue) > queued else None)

    def _feed_head(self, data: bytes) -> bytes:
        """Parse the head alone, as the parser copies what it gets of a body. Returns what is still to be parsed."""
        size = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX) + 4
        if size < 4:
            return data
        self._parse(data[:size])
        if self._refusal is not None or self._phase == LINGER or (self._queue and self._phase == BODY):
            return b""
        if self._intake is None or self._intake.room is None:
            return data[size:]
        self._intake.data_received(memoryview(data)[size:])
        return b""

    def _parse(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            parser = self._parser = httptools.HttpRequestParser(self)
        self._progress = False
        self._fed = len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._target = self._target or (b"" if self._queue else target_in(data))
            self._parse_failed(error, data)
        else:
            self._after_feed(len(data))

    def _after_feed(self, size: int) -> None:
        if self._progress:
            self._raw = 0
            if self._undecided and not self._queue:
                self._decide_body()
            return
        self._raw += size
        if self._raw > self.common.limits.header_bytes_max:
            self._refusal = Refusal(Code.HEADERS_TOO_LARGE if self._phase == HEAD else Code.BAD_HTTP)

    def _parse_failed(self, error: httptools.HttpParserError, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._queue and not self._queue[-1].keep_alive:
            self._phase = LINGER  # the bytes after the last request are dropped
            return
        cause = error.__context__
        if isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "parsing failed", "exception": cause})
            self._refusal = Refusal(Code.INTERNAL)
            return
        why = "HTTP/2 is not supported" if data.startswith(HTTP_2) else str(error)
        self._refusal = Refusal(Code.BAD_HTTP, f"{TABLE[Code.BAD_HTTP].text} {why}.")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers another protocol (h2c, for one) as plain HTTP/1.1."""
        exchange = self._queue.pop()
        if exchange.method == b"CONNECT":
            self._refusal = Refusal(Code.METHOD_NOT_ALLOWED)
            return
        # After an upgrade, the parser leaves all that follows to the other protocol. A new parser, given the framing
        # of this request, reads its body and what comes after.
        framing = [pair for pair in exchange.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        self._exchange = exchange
        self._body = []
        self._undecided = True
        self._phase = BODY
        self._priming = True
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % http1.fields(framing))
        if rest:
            self._feed(rest)

    def _decide_body(self) -> None:
        """Only the head has arrived, and no response is due before this one: continue if the body is wanted."""
        self._undecided = False
        exchange = self._exchange
        assert exchange is not None
        if not self.owner.wants_body(exchange):
            exchange.keep_alive = False
            self._until = self.common.now + self.common.limits.body_timeout_s
            self._drop_body()
            self._queue.append(exchange)
            return
        if not (self._body or exchange.http_1_0) and (exchange.header(b"expect") or b"").lower() == b"100-continue":
            self.put(http1.CONTINUE)
        place, size = self.common.place, self._room
        # not if more is reserved than this body takes: its size is unknown, or parsing began again after an upgrade
        if size and place is not None and exchange.header(b"content-length") == b"%d" % size:
            room = place(exchange, size)
            if room is not None:
                self._read_into(room)

    def _read_into(self, room: memoryview) -> None:
        """Have the body read into this memory, without the parser."""
        assert self._body is not None
        pieces, self._body = self._body, None
        self._parser = None  # the next request gets another one
        intake = self._intake
        if intake is None:
            intake = self._intake = Intake(cast("Connection", self), self.common.head_room)
            self.transport.set_protocol(cast(asyncio.BaseProtocol, intake))
        intake.begin(room)
        for piece in pieces:
            intake.data_received(piece)

    # --- the parser's callbacks

    def on_message_begin(self) -> None:
        if self._phase == IDLE:  # a pipelined request in the same read
            self._begin()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == HEAD:
            assert self._headers is not None
            assert self._fields is not None
            name = name.lower()
            if value and value[-1] <= BLANK:  # no part of the value (RFC 9110, 5.5); the parser drops only what leads
                value = value.rstrip(b" \t")
            self._headers.append((name, value))
            self._fields[name] = value
        elif not self._priming:  # a trailer: counted, then dropped
            self._count_body(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        if self._priming:
            self._priming = False
            return
        parser, headers, fields = self._parser, self._headers, self._fields
        assert parser is not None
        assert headers is not None
        assert fields is not None
        self._progress = True
        limits = self.common.limits
        odd = len(headers) > limits.headers_max or len(fields) != len(headers)
        if odd or self._raw + self._fed > limits.header_bytes_max:  # only then can the head itself be too large
            self._refusal = head_flaw(self._target, headers, limits)
            if self._refusal is not None:
                raise Stop
        keep_alive = parser.should_keep_alive()
        # HTTP/1.0 is either not kept alive or has the header; asking the parser for the version formats a string
        http_1_0 = (not keep_alive or b"connection" in fields) and parser.get_http_version() == "1.0"
        size = int(fields.get(b"content-length") or 0)
        coding = fields.get(b"transfer-encoding")
        if coding is not None and (http_1_0 or b"content-length" in fields or coding.lower() != b"chunked"):
            raise self._stop(Code.BAD_HTTP, "Transfer-Encoding must be chunked, alone, and on HTTP/1.1.")
        if not http_1_0 and b"host" not in fields:
            raise self._stop(Code.BAD_HTTP, "The Host header is missing.")
        if size > limits.body_bytes_max:
            raise self._stop(Code.BODY_TOO_LARGE)
        if size > SMALL_BODY_BYTES:
            self._take_room(size)
        self._exchange = exchange = Exchange(
            cast("Connection", self), parser.get_method(), self._target, headers, fields
        )
        exchange.http_1_0 = http_1_0
        exchange.keep_alive = keep_alive
        self._undecided = True
        self._phase = BODY
        self._since = self.common.now

    def on_body(self, data: bytes) -> None:
        self._progress = True
        self._count_body(len(data))
        assert self._body is not None
        self._body.append(data)

    def on_message_complete(self) -> None:
        exchange, body = self._exchange, self._body
        assert exchange is not None
        self._progress = True
        if body:
            exchange.body = body[0] if len(body) == 1 else b"".join(body)
        self._complete(exchange)
        if len(self._queue) >= self.common.limits.pipelined_max:
            exchange.keep_alive = False  # the client resends the others on another connection
            raise Stop

    # --- internal

    def _complete(self, exchange: Exchange) -> None:
        self._drop_body()
        self._headers = self._fields = None
        self._exchange = None
        self._undecided = False
        self._phase = IDLE
        self._queue.append(exchange)

    def _begin(self) -> None:
        self._phase = HEAD
        self._since = self.common.now
        self._target = b""
        self._headers = []
        self._fields = {}
        self._body = []
        self._body_bytes = 0
        self._raw = 0

    def _count_body(self, size: int) -> None:
        self._body_bytes += size
        if self._body_bytes > self.common.limits.body_bytes_max:
            raise self._stop(Code.BODY_TOO_LARGE)
        if self._body_bytes > SMALL_BODY_BYTES and not self._room:  # chunked: the size is not known in advance
            self._take_room(self.common.limits.body_bytes_max)

    def _take_room(self, size: int) -> None:
        """Reserve memory for a whole large body before it is read, so none is cut off halfway; one always fits."""
        common = self.common
        if common.bodies_bytes and common.bodies_bytes + size > common.limits.bodies_bytes_max:
            raise self._stop(Code.BODIES_LIMIT)
        common.bodies_bytes += size
        self._room = size

    def _drop_body(self) -> None:
        self._body = None
        if self._intake is not None:
            self._intake.room = None
        if self._room:
            self.common.bodies_bytes -= self._room
            self._room = 0

    def _stop(self, code: Code, text: str = "") -> Stop:
        self._refusal = Refusal(code, text)
        return Stop()
