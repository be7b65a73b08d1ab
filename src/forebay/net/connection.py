"""One accepted HTTP/1.1 connection: parses requests within limits and answers them in order.

The handler has one exchange at a time. Requests that arrive meanwhile wait unparsed in a bounded buffer; when it is
full, reading stops. EOF from the client counts as a disconnect, as in other proxies: an abandoned generation must not
run on for a half-closed socket.
"""

import asyncio
import math
from typing import Final, cast

import httptools

from forebay.core.errors import TABLE, Code, Refusal
from forebay.net.exchange import Exchange
from forebay.net.outbox import Sender
from forebay.net.owner import WRITE_BUFFER_BYTES, Owner
from forebay.net.refusing import SMALL_BODY_BYTES, Stop, head_flaw, refusal_answer, target_in
from forebay.net.tls import in_flight_bytes
from forebay.wire import http1
from forebay.wire.errors import error_body

IDLE: Final = 0  # separate assignments: only then does mypyc compile them as constants
HEAD: Final = 1
BODY: Final = 2
LINGER: Final = 3
CLOSED: Final = 4
HELD_BYTES_MAX: Final = 65_536
LINGER_S: Final = 1.0
"""How long to go on reading after a response that ends the connection early: a reset for unread bytes could keep the
client from reading it. A client still sending its body has this long after each part, within the body timeout."""
ALIVE_S: Final = 10.0
"""How often a client that asked for it is told with a 102 that its response is still to come."""
PROCESSING: Final = http1.status_line(102) + b"\r\n"


class Connection(Sender):  # not an asyncio.Protocol: see `Upstream`
    """The asyncio protocol of an accepted socket; also the callback object of its parser."""

    __slots__ = (
        "_active", "_advancing", "_body", "_body_bytes", "_exchange", "_fed", "_fields", "_headers", "_held",
        "_parser", "_paused", "_peer", "_phase", "_priming", "_progress", "_queue", "_raw", "_reading", "_refusal",
        "_room", "_since", "_target", "_undecided", "_unsent", "_until", "common", "owner",
    )  # fmt: skip

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner.common.outbox)
        self.owner = owner
        self.common = owner.common
        self._peer: str | None = None
        self._parser: httptools.HttpRequestParser | None = None
        self._phase = IDLE
        self._since = owner.common.now
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._fields: dict[bytes, bytes] | None = None
        self._body: list[bytes] | None = None
        self._body_bytes = 0
        self._room = 0
        self._exchange: Exchange | None = None
        self._active: Exchange | None = None
        self._queue: list[Exchange] = []
        self._held: list[bytes] | None = None  # no list until needed: saves memory
        self._refusal: Refusal | None = None
        self._undecided = False
        self._progress = False
        self._priming = False
        self._advancing = False
        self._paused = False
        self._reading = True
        self._raw = 0
        self._fed = 0
        self._unsent = 0
        self._until = 0.0

    # --- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        if not self.owner.opened(self):
            self._refuse(Refusal(Code.CONNECTION_LIMIT))

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = CLOSED
        self._leaving = b""
        self._parser = None  # breaks the cycle through the parser's callbacks
        self._exchange = None  # and the one through a request that was being parsed
        self._drop_body()
        self._held = None
        self._queue.clear()
        self.owner.closed(self)
        self._gone()

    def eof_received(self) -> bool:
        self._queue.clear()
        self._close()
        self._gone()
        return False

    def data_received(self, data: bytes) -> None:
        if self._phase >= LINGER:
            if self._phase == LINGER and self.common.now < self._until:
                self._since = self.common.now
            return
        if self._active is not None or self._queue or self._paused:
            self._hold(data)
            return
        self._feed(data)
        if self._queue or self._refusal is not None:
            self._advance()

    def pause_writing(self) -> None:
        self._paused = True
        self._since = self.common.now
        self._unsent = self.transport.get_write_buffer_size()
        active = self._active
        if active is not None and active.source is not None:
            active.source.pause()

    def resume_writing(self) -> None:
        self._paused = False
        self._since = self.common.now
        active = self._active
        if active is None:
            self._advance()
        elif active.source is not None:
            active.source.resume()

    # --- for exchanges

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than we write."""
        return self._paused

    def peer(self) -> str:
        """Address of the client."""
        if self._peer is None:
            name = self.transport.get_extra_info("peername")
            self._peer = str(name[0]) if name else ""
        return self._peer

    def stream(self, data: bytes) -> None:
        """Write a piece of a stream; a client too far behind is disconnected."""
        if self._paused and self.transport.get_write_buffer_size() > self.common.limits.stream_buffer_bytes_max:
            self._cut()
        else:
            self.put(data)

    def rest(self) -> None:
        """A long response has begun: free what only the next request needs."""
        if self._phase == IDLE and not self._queue:
            self._parser = None  # with its callbacks it takes as much memory as the connection itself

    def answered(self, keep_alive: bool) -> None:
        """The active exchange has ended."""
        self._active = None
        if keep_alive and self.common.idle_timeout_s:
            self._since = self.common.now
            if self._queue or self._held or self._refusal is not None or self._undecided:
                self._advance()
        elif self._held or self._phase != IDLE:
            self._linger()  # closing over unread bytes would reset the connection under the answer
        else:
            self._close()

    # --- time, called by the server

    def sweep(self, now: float) -> None:
        """Enforce the timeouts."""
        limits, age = self.common.limits, now - self._since
        if self._phase == CLOSED or self._paused:
            unsent = self.transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._unsent, self._since = unsent, now
            elif self._phase == CLOSED and not unsent:  # TLS: waits for a close_notify that many clients never send
                self._unsent = in_flight_bytes(self.transport)  # if any, the next sweep restarts the timeout
                if not self._unsent and age > LINGER_S:
                    self._cut()
            elif age > limits.write_timeout_s:
                self._cut()
        elif self._active is not None or self._queue:  # a response may take as long as it needs
            if age > ALIVE_S and self.common.alive_for:
                self._since = now
                self._send_processing()
        elif self._phase == LINGER:
            if age > LINGER_S:
                self._close()
        elif self._phase == IDLE:
            if age > self.common.idle_timeout_s:
                self._close()
        elif age > (limits.head_timeout_s if self._phase == HEAD else limits.body_timeout_s):
            self._refuse(Refusal(Code.REQUEST_TIMEOUT))

    @property
    def idle_since(self) -> float:
        """Since when no complete head has arrived, by the server's clock; infinite while busy."""
        busy = self._phase > HEAD or self._active is not None or self._queue or self._paused
        return math.inf if busy else self._since

    def quit(self) -> None:
        """Close if idle, after the linger time if the server sets one; otherwise after the current response."""
        if self._phase == IDLE and self._active is None and not self._queue:
            self._since = self.common.now
            if not self.common.idle_timeout_s:
                self._close()

    def abort(self) -> None:
        """Close at once, even with a request in flight."""
        self.transport.abort()

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
        self._exchange = exchange = Exchange(self, parser.get_method(), self._target, headers, fields)
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
            self._drop_body()
        self._headers = self._fields = None
        self._exchange = None
        self._undecided = False
        self._phase = IDLE
        self._queue.append(exchange)
        if len(self._queue) >= self.common.limits.pipelined_max:
            exchange.keep_alive = False  # the client resends the others on another connection
            raise Stop

    # --- internal

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
        if self._room:
            self.common.bodies_bytes -= self._room
            self._room = 0

    def _stop(self, code: Code, text: str = "") -> Stop:
        self._refusal = Refusal(code, text)
        return Stop()

    def _feed(self, data: bytes) -> None:
        fresh = self._phase == IDLE
        if fresh:
            known = self.common.heads.read(self, data)
            if known is not None:
                self._since = self.common.now
                self._queue.append(known)
                return
            self._begin()
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
            self._parse_failed(error)
        else:
            self._after_feed(len(data))
            if fresh and self._queue:
                self.common.heads.keep(self._queue[0])

    def _after_feed(self, size: int) -> None:
        if self._progress:
            self._raw = 0
            if self._undecided and not self._queue:
                self._decide_body()
            return
        self._raw += size
        if self._raw > self.common.limits.header_bytes_max:
            self._refusal = Refusal(Code.HEADERS_TOO_LARGE if self._phase == HEAD else Code.BAD_HTTP)

    def _parse_failed(self, error: httptools.HttpParserError) -> None:
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
        self._refusal = Refusal(Code.BAD_HTTP, f"{TABLE[Code.BAD_HTTP].text} {error}.")

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

    def _hold(self, data: bytes) -> None:
        held = self._held
        if held is None:
            held = self._held = []
        held.append(data)
        if self._reading and sum(map(len, held)) > HELD_BYTES_MAX:
            self._reading = False
            self.transport.pause_reading()

    def _advance(self) -> None:
        """Continue with what is pending: queued requests, a refusal, unparsed bytes."""
        if self._advancing:
            return
        self._advancing = True
        while self._active is None and not self._paused and self._phase != CLOSED:
            if self._queue:
                self._active = exchange = self._queue.pop(0)
                self._dispatch(exchange)
            elif self._phase == LINGER:
                break
            elif self._refusal is not None:
                self._refuse(self._refusal)
            elif self._held:
                data, self._held = b"".join(self._held), None
                if not self._reading:
                    self._reading = True
                    self.transport.resume_reading()
                self._feed(data)
            elif self._undecided:
                self._decide_body()
            else:
                break
        self._advancing = False

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
        elif not (self._body or exchange.http_1_0) and (exchange.header(b"expect") or b"").lower() == b"100-continue":
            self.put(http1.CONTINUE)

    def _send_processing(self) -> None:
        active = self._active
        if active is not None and not active.started and active.header(self.common.alive_for) is not None:
            self.put(PROCESSING)

    def _dispatch(self, exchange: Exchange) -> None:
        try:
            self.owner.handle(exchange)
        except Exception as error:  # supervisor: an exception in a handler costs one response, not the connection
            asyncio.get_running_loop().call_exception_handler({"message": "handler failed", "exception": error})
            if exchange.started:
                exchange.abort()
            else:
                exchange.respond(500, [http1.JSON], error_body(Refusal(Code.INTERNAL), exchange.path))

    def _refuse(self, refusal: Refusal) -> None:
        """Reject bytes that are not an acceptable request, then close."""
        self._refusal = None
        self.owner.refused(refusal.code)
        target, fields = self._target, self._fields or {}
        if self._phase == IDLE:  # after a complete request, nothing is known of the next one
            target, fields = b"", {}
        request_id = self.owner.named(Exchange(self, b"", target, [], fields), refusal.code)
        self.put(refusal_answer(refusal, target, self.common.date, request_id))
        self._linger()

    def _linger(self) -> None:
        """Half-close and discard what still arrives for a while, so that the client can read its response."""
        if self._phase == CLOSED:
            return
        self._phase = LINGER
        self._since = self.common.now
        self._drop_body()
        self._queue.clear()
        self._held = None
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()
        self.leave()
        if self.transport.can_write_eof() and not self.transport.is_closing():  # TLS cannot half-close
            self.transport.write_eof()

    def _close(self) -> None:
        if self._phase != CLOSED:
            self._phase = CLOSED
            self._since = self.common.now
            self.leave()
            self._unsent = self.transport.get_write_buffer_size()
            self.transport.close()

    def _cut(self) -> None:
        self._phase = CLOSED
        self.transport.abort()
        self._gone()

    def _gone(self) -> None:
        exchange = self._active
        self._active = None
        if exchange is not None:
            exchange.gone()
