"""One connection to an upstream. Bytes are passed on only once parsed, and never past the end of a message."""

import asyncio
from typing import TYPE_CHECKING, Final, Literal, cast

import httptools

from forebay.net.client.call import MISTAKE, Call, Header, because, report
from forebay.net.outbox import Sender
from forebay.net.replica_protocol import USAGE
from forebay.wire import http1

if TYPE_CHECKING:
    from forebay.net.client.pool import Pool

PART_BYTES: Final = 32_768
"""How much is processed at once. One read may return eight times as much, of which several copies would be made."""
SILENCE_S: Final = 600.0
"""How long a response may make no progress: real work is hardly ever silent for longer, and clients have given up."""
ALIVE_SILENCE_S: Final = 60.0
"""The same limit before the response head, for an upstream that sends 1xx responses several times in this period."""
FAILURE_S: Final = 10.0
"""How long a response with a status of 300 or more may take from its head to its end."""
HEAD_BYTES_MAX: Final = 65_536
BODILESS: Final = frozenset({204, 304})
CHUNKED: Final = (b"transfer-encoding", b"chunked")
KNOWN_BYTES_MAX: Final = 2048
KNOWN_MAX: Final = 64
_COUNTS_LINE: Final = b"\r\n" + USAGE + b": "
"""Of the header or trailer with the token counts, which differ in nearly every stream."""
_LAST_WITH_COUNTS: Final = b"0" + _COUNTS_LINE
_COUNTS_BYTES_MAX: Final = 64


class CachedHead:
    """A parsed response head, reused for streams whose head differs in the token counts only.

    It is looked up by its bytes without these counts. `net.owner` does the same for requests.
    """

    __slots__ = ("headers", "keep_alive", "status")

    def __init__(self, status: int, headers: list[Header], keep_alive: bool) -> None:
        self.status = status
        self.headers = headers
        self.keep_alive = keep_alive

    def with_counts(self, counts: bytes) -> list[Header]:
        """The headers with these token counts, if there are any."""
        if not counts:
            return self.headers.copy()
        return [(name, counts if name == USAGE else value) for name, value in self.headers]


class Upstream(Sender):  # not an asyncio.Protocol: compiled code reads attributes of a native class much faster
    """One connection to the upstream: an asyncio protocol, and the callback object of its parser."""

    __slots__ = (
        "_between", "_body", "_call", "_complete", "_ended", "_head", "_head_bytes", "_headers", "_held",
        "_keep_alive", "_later", "_parser", "_pool", "_raw", "_reused", "_since", "_status", "_to_eof",
        "_touched", "_unread", "idle_since", "on_body",
    )  # fmt: skip

    def __init__(self, pool: "Pool") -> None:
        super().__init__(pool.outbox)
        self._pool = pool
        self._parser: httptools.HttpResponseParser | None = None
        self.idle_since = 0.0
        self._reused = False
        self._call: Call | None = None
        self._body: list[bytes] = []
        self._held = b""  # already read when the sink paused
        self._later = b""  # read in the middle of a stream; handed on later in this loop iteration
        self.on_body = self._body.append  # bound directly: the parser calls it for every piece
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: list[Header] | None = None  # of the head being parsed, later of the trailers
        self._head: list[Header] | None = None  # parsed, not yet handed to the sink
        self._body.clear()
        self._head_bytes = 0
        self._keep_alive = False
        self._between = False  # a chunk has ended, and nothing has followed yet
        self._unread = b""  # a cached head: neither it nor what followed has gone through the parser
        self._ended = 0  # how many body pieces preceded the last end of a chunk
        self._to_eof = False
        self._complete = False
        self._touched = False
        self._raw = 0
        self._since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def run(self, call: Call) -> None:
        """Send the request of a call."""
        self._call = call
        self.send(call.request)

    def drop(self) -> None:
        """Close the connection now; the call does not need it any more."""
        self._call = None
        self.transport.abort()

    def eof_received(self) -> bool:
        self.process_deferred()
        if self._to_eof and self._call is not None:
            call, self._call = self._call, None
            call.end([])
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.process_deferred()
        self._leaving = b""
        self._parser = None  # breaks the cycle through the parser's callbacks
        self._pool.lost(self)
        call, self._call = self._call, None
        if call is None:
            return
        if self._reused and not self._touched and not call.once:
            self._pool.again(call)  # the upstream closed an idle connection while the request was in transit
        else:
            call.fail("lost", f"The connection was closed before the answer was complete{because(exc)}.")

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # no request is outstanding: the connection is unusable
            self.transport.abort()
            return
        if self._later:
            self.process_deferred()
            if self._call is not call:  # its response has ended, and more data has arrived
                self.transport.abort()
                return
        self._touched = True
        if len(data) > PART_BYTES:
            self._take_in_parts(call, data)
        elif self._between:
            self._later = data
            self._outbox.defer(self)
        else:
            self._take(call, data)

    def process_deferred(self) -> None:
        """Process deferred data, before anything that arrived after it."""
        data, self._later = self._later, b""
        if data and self._call is not None:
            self._take(self._call, data)

    def _take(self, call: Call, data: bytes) -> None:
        lone, problem = b"", ""
        if self._between or self._unread:
            lone = http1.lone_chunk(data)
            if not lone and not self._ends(data):
                problem = self._parse(data)
        elif self._status or self._raw or not self._take_cached_head(data):
            problem = self._parse(data)
        try:
            if lone:  # the middle of a stream, nearly always; the parser's state would be the same afterwards
                self._raw = 0
                self._between = True
                assert call.sink is not None
                call.sink.on_body(lone)
                return
            if self._head is not None or self._body or self._complete:
                self._raw = 0
            else:  # an unfinished head, trailer or chunk size, which the parser would buffer without limit
                self._raw += len(data)
                if self._raw > HEAD_BYTES_MAX and not problem:
                    problem = f"its head or trailers are larger than {HEAD_BYTES_MAX} bytes"
            self._deliver(call, problem)
        except Exception as mistake:  # supervisor: an exception in a sink costs its own response only
            report(mistake)
            self._give_up(call, "protocol", MISTAKE)

    def _take_cached_head(self, data: bytes) -> bool:
        """Process a cached head and at most one whole chunk after it. False if the data is anything else."""
        size = data.find(b"\r\n\r\n", 0, KNOWN_BYTES_MAX) + 4
        head = data[:size]
        key, counts = self._split_counts(head)
        known = self._pool.known.get(key)
        if known is None:
            return False
        if len(data) > size:
            lone = http1.lone_chunk(data[size:])
            if not lone:
                return False
            self._body.append(lone)
            self._between = True
        self._status = known.status
        self._head = known.with_counts(counts)
        self._keep_alive = known.keep_alive
        self._since = 0.0
        self._unread = head
        return True

    def _split_counts(self, head: bytes) -> tuple[bytes, bytes]:
        """The head with its token counts replaced by 0, and the counts; the head unchanged if they are not formatted
        as usual."""
        begin = self._pool.counts_begin
        at = begin + len(_COUNTS_LINE)
        if head[begin:at] != _COUNTS_LINE:
            begin = head.find(_COUNTS_LINE)
            if begin < 0:
                return head, b""
            self._pool.counts_begin, at = begin, begin + len(_COUNTS_LINE)
        end = head.find(b"\r\n", at)
        counts = _counts(head[at:end])
        return (head[:at] + b"0" + head[end:], counts) if counts else (head, b"")

    def _ends(self, data: bytes) -> bool:
        """Process the end of a stream that bypassed the parser, if it is formatted as usual. False if not."""
        if not self._unread:
            return False
        counts = b""
        size = data.rfind(_LAST_WITH_COUNTS)
        begin, end = size + len(_LAST_WITH_COUNTS), len(data) - 4
        if size >= 0 and begin < end and data.endswith(b"\r\n\r\n"):  # compiled, no slice may end before it begins
            counts = _counts(data[begin:end])
        if not counts:
            size = len(data) - len(http1.LAST_CHUNK)
            if not data.endswith(http1.LAST_CHUNK):
                return False
        if size > 0:
            lone = http1.lone_chunk(data[:size])
            if not lone:
                return False
            self._body.append(lone)
        if counts:
            self._headers = [(USAGE, counts)]
        self._complete = True
        return True

    def _parse(self, data: bytes) -> str:
        """Run the parser over the data. Returns what is wrong with it; empty: nothing."""
        parser = self._parser
        assert parser is not None
        problem = ""
        fresh = not self._status and not self._raw
        try:
            if self._unread:
                head, self._unread = self._unread, b""
                parser.feed_data(head)
                self._head = None  # already handed on
            self._ended = 0
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            problem = "it switched protocols unasked"
        except httptools.HttpParserError as error:
            problem = str(error)
            if isinstance(error, httptools.HttpParserCallbackError):
                problem = str(error.__context__)
        # the last condition: what follows the chunk is not the size line of the next one, which is never empty
        self._between = 0 < self._ended == len(self._body) and data.endswith(b"\n\r\n")
        if fresh and not problem and self._head is not None and CHUNKED in self._head:
            self._remember(data, self._head)
        return problem

    def _remember(self, data: bytes, headers: list[Header]) -> None:
        size = data.find(b"\r\n\r\n", 0, KNOWN_BYTES_MAX) + 4
        known = self._pool.known
        if size > 3 and data.startswith(b"HTTP/1.1 200 ") and sum([name == USAGE for name, _ in headers]) < 2:
            if len(known) >= KNOWN_MAX:
                known.clear()
            known[self._split_counts(data[:size])[0]] = CachedHead(self._status, headers.copy(), self._keep_alive)

    def resume(self, call: Call) -> None:
        """The sink resumed: process what was buffered while it was paused."""
        held, self._held = self._held, b""
        self._take_in_parts(call, held)

    def _take_in_parts(self, call: Call, data: bytes) -> None:
        for at in range(0, len(data), PART_BYTES):
            if self._call is not call:  # its response has ended, and more data has arrived that belongs to no call
                self.transport.abort()
                return
            if not call.reads:
                self._held = data[at:]
                return
            self._take(call, data[at : at + PART_BYTES])

    def pause_writing(self) -> None:
        """Does nothing: a request is written in one piece, so there is no writer to pause."""

    def resume_writing(self) -> None:
        """Does nothing, as `pause_writing`."""

    def sweep(self, now: float) -> None:
        """Fail the call if its response has stalled for too long. `now` is the loop's time."""
        call = self._call
        if call is None:
            return
        failing = self._status >= 300
        if not self._since or not call.reads or (self._touched and not failing):
            self._since = now
        if self._touched:
            self._touched = self._reused = False  # once part of a response has arrived, the request is not retried
        limit_s = FAILURE_S if failing else SILENCE_S
        if self._pool.sends_1xx and not self._status:
            limit_s = ALIVE_SILENCE_S
        if now - self._since > limit_s:
            self._give_up(call, "lost", f"The response made too little progress in {limit_s:g} s.")

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
        else:  # a 1xx response
            self._headers = None
            self._head_bytes = self._raw = 0
            self._pool.sends_1xx = True

    def _take_body(self) -> bytes:
        whole = b"".join(self._body)
        self._body.clear()
        return whole

    def _deliver(self, call: Call, problem: str) -> None:
        """Hand on the outcome of the last read. The sink may cancel the call at every step."""
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


def _counts(value: bytes) -> bytes:
    """The value, if it is nothing but digits and commas; otherwise empty."""
    return value if len(value) <= _COUNTS_BYTES_MAX and value.replace(b",", b"").isdigit() else b""
