"""An HTTP/1.1 client for one upstream: pooled keep-alive connections, answers handed on as they arrive.

Bytes are forwarded only after they were parsed, and never past the end of a message.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol, cast

import httptools

from forebay.net.keepalive import keep_alive
from forebay.wire import http1

Header = tuple[bytes, bytes]

CONNECT_TIMEOUT_S: Final = 2.0
CONNECTING_MAX: Final = 64
"""Connections of a pool that are being made at once: each takes more memory than when it is there. Others wait."""
IDLE_MAX: Final = 256
IDLE_AGE_S: Final = 50.0
"""Shorter than the idle timeout of our own servers, so that they rarely close under a request."""
PART_BYTES: Final = 32_768
"""What is taken in at once. A read may bring eight times as much, of which several copies would be made."""
SILENCE_S: Final = 600.0
"""So long nothing may come of an answer: honest work is hardly ever silent for so long, and clients have left."""
ALIVE_SILENCE_S: Final = 60.0
"""The same before an answer, of an upstream that tells several times in this time, with 1xx, that it works."""
FAILURE_S: Final = 10.0
"""So long an answer that tells of no success may take from its head to its end."""
SWEEP_S: Final = 1.0
MISTAKE: Final = "The answer could not be handled."
HEAD_BYTES_MAX: Final = 65_536
BODILESS: Final = frozenset({204, 304})


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
        connection.send(self)

    def end(self, trailers: list[Header]) -> None:
        """Hand the end on."""
        sink, self.sink, self.connection = self.sink, None, None
        if sink is not None:
            try:
                sink.on_end(trailers)
            except Exception as mistake:  # supervisor: as in `data_received`
                _tell(mistake)
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
        _tell(mistake)


def _tell(mistake: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": "handling an answer failed", "exception": mistake})


class Upstream:  # derives from nothing: compiled code gets at the attributes of such classes far sooner
    """One connection to the upstream: an asyncio protocol, and the callback object of its parser."""

    __slots__ = (
        "_between", "_body", "_call", "_complete", "_ended", "_head", "_head_bytes", "_headers", "_held",
        "_keep_alive", "_parser", "_pool", "_raw", "_reused", "_since", "_status", "_to_eof", "_touched",
        "idle_since", "on_body", "transport",
    )  # fmt: skip

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._parser: httptools.HttpResponseParser | None = None
        self.transport: asyncio.Transport
        self.idle_since = 0.0
        self._reused = False
        self._call: Call | None = None
        self._body: list[bytes] = []
        self._held = b""  # was read already when the sink had enough
        self.on_body = self._body.append  # the parser calls this for every piece, so without a frame of our own
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: list[Header] | None = None  # of a head that is read, later of the trailers
        self._head: list[Header] | None = None  # of one that is to be handed on
        self._body.clear()
        self._head_bytes = 0
        self._keep_alive = False
        self._between = False  # the parser has seen a chunk to its end, and nothing after it
        self._ended = 0  # so many pieces of the body came before a chunk last ended
        self._to_eof = False
        self._complete = False
        self._touched = False
        self._raw = 0
        self._since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, call: Call) -> None:
        """Send the request of a call."""
        self._call = call
        self.transport.write(call.request)

    def drop(self) -> None:
        """Close now; nobody waits for anything any more."""
        self._call = None
        self.transport.abort()

    def eof_received(self) -> bool:
        if self._to_eof and self._call is not None:
            call, self._call = self._call, None
            call.end([])
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser = None  # breaks the cycle through the parser's callbacks
        self._pool.lost(self)
        call, self._call = self._call, None
        if call is None:
            return
        if self._reused and not self._touched:
            self._pool.again(call)  # the upstream closed an idle connection while the request was on its way
        else:
            call.fail("lost", f"The connection was closed before the answer was complete{_because(exc)}.")

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nothing was asked: whatever this is, the connection is of no use
            self.transport.abort()
            return
        if len(data) > PART_BYTES:
            self._take_in_parts(call, data)
            return
        self._touched = True
        lone = http1.lone_chunk(data) if self._between else b""
        problem = "" if lone else self._parse(data)
        try:
            if lone:  # the middle of a stream, nearly always; the parser would be where it is
                self._raw = 0
                assert call.sink is not None
                call.sink.on_body(lone)
                return
            if self._head is not None or self._body or self._complete:
                self._raw = 0
            else:  # an unfinished head, trailer or chunk size, which the parser would collect without end
                self._raw += len(data)
                if self._raw > HEAD_BYTES_MAX and not problem:
                    problem = f"its head or trailers are larger than {HEAD_BYTES_MAX} bytes"
            self._deliver(call, problem)
        except Exception as mistake:  # supervisor: a mistake in a sink costs its own answer
            _tell(mistake)
            self._give_up(call, "protocol", MISTAKE)

    def _parse(self, data: bytes) -> str:
        """Have the parser tell what is in these bytes. Returns what is wrong with them."""
        assert self._parser is not None
        problem = ""
        self._ended = 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            problem = "it switched protocols unasked"
        except httptools.HttpParserError as error:
            problem = str(error)
            if isinstance(error, httptools.HttpParserCallbackError):
                problem = str(error.__context__)
        # the last condition: what came after the chunk was not the next one's first line, which is never empty
        self._between = 0 < self._ended == len(self._body) and data.endswith(b"\n\r\n")
        return problem

    def read_on(self, call: Call) -> None:
        """Its sink takes more: begin with what was read before."""
        held, self._held = self._held, b""
        self._take_in_parts(call, held)

    def _take_in_parts(self, call: Call, data: bytes) -> None:
        for at in range(0, len(data), PART_BYTES):
            if self._call is not call:  # its answer has ended and more has come: nobody may get that for his answer
                self.transport.abort()
                return
            if not call.reads:
                self._held = data[at:]
                return
            self.data_received(data[at : at + PART_BYTES])

    def pause_writing(self) -> None:
        """Requests are written at once: nobody could wait."""

    def resume_writing(self) -> None:
        """The same."""

    def sweep(self, now: float) -> None:
        """Fail the call if too little has come of its answer for too long. `now` is the loop's time."""
        call = self._call
        if call is None:
            return
        failing = self._status >= 300
        if not self._since or not call.reads or (self._touched and not failing):
            self._since = now
        if self._touched:
            self._touched = self._reused = False  # what has had a part of an answer is not sent again
        limit_s = FAILURE_S if failing else SILENCE_S
        if self._pool.tells and not self._status:
            limit_s = ALIVE_SILENCE_S
        if now - self._since > limit_s:
            self._give_up(call, "lost", f"Too little came of it in {limit_s:g} s.")

    def _give_up(self, call: Call, kind: Literal["lost", "protocol"], text: str) -> None:
        if self._call is call:
            self._call = None
            self.transport.abort()
        call.fail(kind, text)

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second answer follows the first")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            raise ValueError(f"its head or trailers are larger than {HEAD_BYTES_MAX} bytes")
        if self._headers is None:
            self._headers = []
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        status = parser.get_status_code()
        if status < 200:
            return
        self._status = status
        self._head, self._headers = self._headers or [], None
        self._since = 0.0
        self._keep_alive = parser.should_keep_alive()
        if not self._keep_alive and status not in BODILESS:
            self._to_eof = not {b"content-length", b"transfer-encoding"} & {name for name, _ in self._head}

    def on_chunk_complete(self) -> None:
        self._ended = len(self._body)

    def on_message_complete(self) -> None:
        if self._status:
            self._complete = True
        else:  # a 1xx answer
            self._headers = None
            self._head_bytes = self._raw = 0
            self._pool.tells = True

    def _take_body(self) -> bytes:
        whole = b"".join(self._body)
        self._body.clear()
        return whole

    def _deliver(self, call: Call, problem: str) -> None:
        """Hand on what the last read brought. The sink may cancel the call at every step."""
        sink = call.sink
        assert sink is not None
        head, self._head = self._head, None
        if head is not None:
            sink.on_head(self._status, head)
        if self._body and self._call is call:
            sink.on_body(self._take_body())
        if self._call is not call:
            return
        if self._complete:
            trailers = self._headers or []
            self._call = None
            if problem or not self._keep_alive or self.transport.is_closing():
                self.transport.abort()
            else:
                self._reset()
                self._reused = True
                self._pool.release(self)
            call.resume()
            call.end(trailers)
        elif problem:
            self._give_up(call, "protocol", f"The answer is not valid HTTP: {problem}.")


class Pool:
    """Connections to one upstream, with `tls` for HTTPS; `greeting` is a header line of the first request on each.
    Connecting runs in tasks of `group`; `close` ends them."""

    def __init__(
        self,
        host: str,
        port: int,
        group: asyncio.TaskGroup,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        idle_max: int = IDLE_MAX,
        idle_age_s: float = IDLE_AGE_S,
        tls: ssl.SSLContext | None = None,
        greeting: bytes = b"",
    ) -> None:
        self.host = host
        self.port = port
        self._group = group
        self._connect_timeout_s = connect_timeout_s
        self._idle_max = idle_max
        self._idle_age_s = idle_age_s
        self._tls, self._greeting = tls, greeting
        self._idle: deque[Upstream] = deque()
        self._open: dict[Upstream, None] = {}
        self._connecting: dict[asyncio.Task[None], Call] = {}
        self._line: deque[Call] = deque()
        """Calls that wait for their turn to connect, or for a connection that comes free before."""
        self._closed = False
        self._sweep_at = 0.0
        self.tells = False
        """Whether the upstream has ever told with a 1xx answer that it works."""
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._open)

    def call(self, request: bytes, sink: Sink) -> Call:
        """Send a complete request (not HEAD). The sink is never called before this returns."""
        call = Call(self, request, sink)
        oldest = self._now() - self._idle_age_s
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.transport.is_closing():
                call.run_on(connection)
                return call
            connection.transport.abort()
        self.again(call)
        return call

    def again(self, call: Call) -> None:
        """Run a call on a fresh connection."""
        call.connection = None
        if call.sink is None:
            return
        if self._closed:
            asyncio.get_running_loop().call_soon(call.fail, "connect", "The pool is closed.")
            return
        self._line.append(call)
        self._begin()

    def release(self, connection: Upstream) -> None:
        """Take back a connection that has finished its call."""
        if self._closed:
            connection.transport.abort()
            return
        while self._line:
            call = self._line.popleft()
            if call.sink is not None:
                call.run_on(connection)
                return
        connection.idle_since = now = self._now()
        self._idle.append(connection)
        idle, oldest = self._idle, now - self._idle_age_s
        while idle and (len(idle) > self._idle_max or idle[0].idle_since < oldest):
            idle.popleft().transport.abort()

    def lost(self, connection: Upstream) -> None:
        """Forget a connection that is closed."""
        self._open.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Fail calls of whose answer too little has come for too long. To be called often; `now`: the loop's time."""
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            for connection in list(self._open):
                connection.sweep(now)

    def close(self) -> None:
        """Close every connection; calls under way fail."""
        self._closed = True
        self._idle.clear()
        for task, call in list(self._connecting.items()):
            task.cancel()
            self._fail(call, "The pool is closed.")
        for connection in list(self._open):
            connection.transport.abort()

    def _begin(self, tried: asyncio.Task[None] | None = None) -> None:
        if tried is not None:
            del self._connecting[tried]
        while self._line and len(self._connecting) < CONNECTING_MAX:
            call = self._line.popleft()
            if call.sink is not None:
                task = self._group.create_task(self._connect(call))
                self._connecting[task] = call
                task.add_done_callback(self._begin)

    def _fail(self, call: Call, text: str) -> None:
        """Fail a call and all that wait behind it: they would not fare better, and later."""
        failed, self._line = [call, *self._line], deque()
        for each in failed:
            each.fail("connect", text)

    async def _connect(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, made = await loop.create_connection(
                    lambda: cast(asyncio.Protocol, Upstream(self)), self.host, self.port, ssl=self._tls
                )
        except TimeoutError:
            self._fail(call, f"No connection to {self.host}:{self.port} within {self._connect_timeout_s:g} s.")
        except OSError as error:
            self._fail(call, f"No connection to {self.host}:{self.port}{_because(error)}.")
        else:
            connection = cast(Upstream, made)
            self._open[connection] = None
            keep_alive(connection.transport)
            if call.sink is None:
                self.release(connection)
            else:
                if self._greeting:
                    call.request = call.request.replace(b"\r\n", b"\r\n" + self._greeting, 1)
                call.run_on(connection)


def _because(error: Exception | None) -> str:
    return f": {error}" if error else ""
