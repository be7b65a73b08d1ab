"""One accepted HTTP/1.1 connection: answers the requests that it reads in order, and ends in time.

The handler has one exchange at a time. Requests that arrive meanwhile wait unparsed in a bounded buffer; when it is
full, reading stops. EOF from the client counts as a disconnect, as in other proxies: an abandoned generation must not
run on for a half-closed socket.
"""

import asyncio
import math
from typing import Final, cast

from forebay.core.errors import Code, Refusal
from forebay.net.exchange import Exchange
from forebay.net.owner import WRITE_BUFFER_BYTES, Owner
from forebay.net.reading.reader import CLOSED, HEAD, IDLE, LINGER, Reader
from forebay.net.reading.refusing import refusal_answer
from forebay.net.tls import in_flight_bytes
from forebay.wire import http1
from forebay.wire.errors import error_body

HELD_BYTES_MAX: Final = 65_536
LINGER_S: Final = 1.0
"""How long to go on reading after a response that ends the connection early: a reset for unread bytes could keep the
client from reading it. A client still sending its body has this long after each part, within the body timeout."""
ALIVE_S: Final = 10.0
"""How often a client that asked for it is told with a 102 that its response is still to come."""
PROCESSING: Final = http1.status_line(102) + b"\r\n"


class Connection(Reader):  # not an asyncio.Protocol: see `Upstream`
    """The asyncio protocol of an accepted socket."""

    __slots__ = ("_active", "_advancing", "_due", "_held", "_paused", "_peer", "_reading", "_unsent", "cut")

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._peer: str | None = None
        self._active: Exchange | None = None
        self._held: list[bytes] | None = None  # no list until needed: saves memory
        self._advancing = False
        self._due = False  # what is pending goes on in the next loop iteration
        self._paused = False
        self._reading = True
        self._unsent = 0
        self.cut = False
        """Whether we disconnected the client because it did not read in time."""

    def turn_away(self, refusal: Refusal, target: bytes) -> None:
        """Answer with this error once the connection is made, and read nothing; `target`: that of the request."""
        self._refusal, self._target, self._phase = refusal, target, HEAD

    # --- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        if not self.owner.opened(self):
            self._refuse(Refusal(Code.CONNECTION_LIMIT))
        elif self._refusal is not None:
            self._refuse(self._refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = CLOSED
        self._leaving = b""
        self._parser = None  # breaks the cycle through the parser's callbacks
        self._exchange = None  # and the one through a request that was being parsed
        self._drop_body()
        self._intake = None  # and its own
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
        if self._active is not None or self._queue or self._paused or self._due:
            self._hold(data)
            return
        self._feed(data)
        if self._queue or self._refusal is not None:
            self._advance()

    def arrived(self, body: memoryview) -> None:
        """A body that was read into memory of the handler's choice is complete."""
        exchange = self._exchange
        assert exchange is not None
        exchange.placed = body
        self._complete(exchange)
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

    def encrypted(self) -> bool:
        """Whether the client uses TLS."""
        return self.transport.get_extra_info("sslcontext") is not None

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
            pending = self._queue or self._held or self._refusal is not None or self._undecided
            if pending and not self._advancing:
                self._due = True  # not at once: who has ended it may still hold what the next one needs
                asyncio.get_running_loop().call_soon(self._go_on)
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
        busy = self._phase > HEAD or self._active is not None or self._queue or self._paused or self._due
        return math.inf if busy else self._since

    def quit(self) -> None:
        """Close if idle, after the linger time if the server sets one; otherwise after the current response."""
        if self._phase == IDLE and self._active is None and not self._queue and not self._due:
            self._since = self.common.now
            if not self.common.idle_timeout_s:
                self._close()

    def abort(self) -> None:
        """Close at once, even with a request in flight."""
        self.transport.abort()

    # --- internal

    def _hold(self, data: bytes) -> None:
        held = self._held
        if held is None:
            held = self._held = []
        held.append(data)
        if self._reading and sum(map(len, held)) > HELD_BYTES_MAX:
            self._reading = False
            self.transport.pause_reading()

    def _go_on(self) -> None:
        self._due = False
        self._advance()

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
        seen = Exchange(self, b"", target, [], fields)
        request_id = self.owner.refusal_id(seen, refusal.code)
        self.put(refusal_answer(refusal, target, self.common.date + seen.extra, request_id))
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
        self.cut = True
        self.transport.abort()
        self._gone()

    def _gone(self) -> None:
        exchange = self._active
        self._active = None
        if exchange is not None:
            exchange.gone()
