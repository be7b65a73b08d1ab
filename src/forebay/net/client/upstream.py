"""One connection to an upstream. Bytes go on only after they were parsed, and never past the end of a message."""

import asyncio
from typing import TYPE_CHECKING, Final, Literal, cast

import httptools

from forebay.net.client.call import MISTAKE, Call, Header, because, tell
from forebay.net.outbox import Sender
from forebay.wire import http1

if TYPE_CHECKING:
    from forebay.net.client.pool import Pool

PART_BYTES: Final = 32_768
"""What is taken in at once. A read may bring eight times as much, of which several copies would be made."""
SILENCE_S: Final = 600.0
"""So long nothing may come of an answer: honest work is hardly ever silent for so long, and clients have left."""
ALIVE_SILENCE_S: Final = 60.0
"""The same before an answer, of an upstream that tells several times in this time, with 1xx, that it works."""
FAILURE_S: Final = 10.0
"""So long an answer that tells of no success may take from its head to its end."""
HEAD_BYTES_MAX: Final = 65_536
BODILESS: Final = frozenset({204, 304})
CHUNKED: Final = (b"transfer-encoding", b"chunked")
KNOWN_BYTES_MAX: Final = 2048
KNOWN_MAX: Final = 64
COUNTS: Final = b"x-forebay-usage"
"""The header, or trailer, with token counts, which hardly two streams have in common."""
_COUNTS_LINE: Final = b"\r\n" + COUNTS + b": "
_LAST_WITH_COUNTS: Final = b"0" + _COUNTS_LINE
_COUNTS_BYTES_MAX: Final = 64


class Known:
    """A head that the parser has read before: of a stream that says nothing but the date and its token counts.

    It is known by its bytes but for these counts. See `net.owner`, where requests are.
    """

    __slots__ = ("headers", "keep_alive", "status")

    def __init__(self, status: int, headers: list[Header], keep_alive: bool) -> None:
        self.status = status
        self.headers = headers
        self.keep_alive = keep_alive

    def told(self, counts: bytes) -> list[Header]:
        """The headers with these token counts, if there are any."""
        if not counts:
            return self.headers.copy()
        return [(name, counts if name == COUNTS else value) for name, value in self.headers]


class Upstream(Sender):  # of asyncio's no class: compiled code gets at attributes of its own far sooner
    """One connection to the upstream: an asyncio protocol, and the callback object of its parser."""

    __slots__ = (
        "_between", "_body", "_call", "_complete", "_ended", "_head", "_head_bytes", "_headers", "_held",
        "_keep_alive", "_later", "_parser", "_pool", "_raw", "_reused", "_since", "_status", "_to_eof", "_touched",
        "_unread", "idle_since", "on_body",
    )  # fmt: skip

    def __init__(self, pool: "Pool") -> None:
        super().__init__(pool.outbox)
        self._pool = pool
        self._parser: httptools.HttpResponseParser | None = None
        self.idle_since = 0.0
        self._reused = False
        self._call: Call | None = None
        self._body: list[bytes] = []
        self._held = b""  # was read already when the sink had enough
        self._later = b""  # was read in the middle of a stream, and is handed on later in this round
        self.on_body = self._body.append  # the parser calls this for every piece, so without a frame of our own
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: list[Header] | None = None  # of a head that is read, later of the trailers
        self._head: list[Header] | None = None  # of one that is to be handed on
        self._body.clear()
        self._head_bytes = 0
        self._keep_alive = False
        self._between = False  # a chunk has ended, and nothing has come after it
        self._unread = b""  # a head that was known, so that the parser has not seen it, nor what followed
        self._ended = 0  # so many pieces of the body came before a chunk last ended
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
        """Close now; nobody waits for anything any more."""
        self._call = None
        self.transport.abort()

    def eof_received(self) -> bool:
        self.go_on()
        if self._to_eof and self._call is not None:
            call, self._call = self._call, None
            call.end([])
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.go_on()
        self._leaving = b""
        self._parser = None  # breaks the cycle through the parser's callbacks
        self._pool.lost(self)
        call, self._call = self._call, None
        if call is None:
            return
        if self._reused and not self._touched:
            self._pool.again(call)  # the upstream closed an idle connection while the request was on its way
        else:
            call.fail("lost", f"The connection was closed before the answer was complete{because(exc)}.")

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nothing was asked: whatever this is, the connection is of no use
            self.transport.abort()
            return
        if self._later:
            self.go_on()
            if self._call is not call:  # its answer has ended, and more has come
                self.transport.abort()
                return
        self._touched = True
        if len(data) > PART_BYTES:
            self._take_in_parts(call, data)
        elif self._between:
            self._later = data
            self._outbox.put_aside(self)
        else:
            self._take(call, data)

    def go_on(self) -> None:
        """Hand on what was put aside; before anything that has come after it."""
        data, self._later = self._later, b""
        if data and self._call is not None:
            self._take(self._call, data)

    def _take(self, call: Call, data: bytes) -> None:
        lone, problem = b"", ""
        if self._between or self._unread:
            lone = http1.lone_chunk(data)
            if not lone and not self._ends(data):
                problem = self._parse(data)
        elif self._status or self._raw or not self._knows(data):
            problem = self._parse(data)
        try:
            if lone:  # the middle of a stream, nearly always; the parser would be where it is
                self._raw = 0
                self._between = True
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
            tell(mistake)
            self._give_up(call, "protocol", MISTAKE)

    def _knows(self, data: bytes) -> bool:
        """Take in a known head, and the chunk that follows it, if that is all."""
        size = data.find(b"\r\n\r\n", 0, KNOWN_BYTES_MAX) + 4
        head = data[:size]
        key, counts = _parted(head)
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
        self._head = known.told(counts)
        self._keep_alive = known.keep_alive
        self._since = 0.0
        self._unread = head
        return True

    def _ends(self, data: bytes) -> bool:
        """Take in the end of a stream of which the parser has seen nothing, in its usual spelling."""
        if not self._unread:
            return False
        counts = b""
        size = data.rfind(_LAST_WITH_COUNTS)
        if size >= 0:
            counts = _counts(data[size + len(_LAST_WITH_COUNTS) : -4])
        if not counts or not data.endswith(b"\r\n\r\n"):
            counts = b""
            size = len(data) - len(http1.LAST_CHUNK)
            if not data.endswith(http1.LAST_CHUNK):
                return False
        if size > 0:
            lone = http1.lone_chunk(data[:size])
            if not lone:
                return False
            self._body.append(lone)
        if counts:
            self._headers = [(COUNTS, counts)]
        self._complete = True
        return True

    def _parse(self, data: bytes) -> str:
        """Have the parser tell what is in these bytes. Returns what is wrong with them."""
        parser = self._parser
        assert parser is not None
        problem = ""
        fresh = not self._status and not self._raw
        try:
            if self._unread:
                head, self._unread = self._unread, b""
                parser.feed_data(head)
                self._head = None  # it was handed on
            self._ended = 0
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            problem = "it switched protocols unasked"
        except httptools.HttpParserError as error:
            problem = str(error)
            if isinstance(error, httptools.HttpParserCallbackError):
                problem = str(error.__context__)
        # the last condition: what came after the chunk was not the next one's first line, which is never empty
        self._between = 0 < self._ended == len(self._body) and data.endswith(b"\n\r\n")
        if fresh and not problem and self._head is not None and CHUNKED in self._head:
            self._remember(data, self._head)
        return problem

    def _remember(self, data: bytes, headers: list[Header]) -> None:
        size = data.find(b"\r\n\r\n", 0, KNOWN_BYTES_MAX) + 4
        known = self._pool.known
        if size > 3 and data.startswith(b"HTTP/1.1 200 ") and sum([name == COUNTS for name, _ in headers]) < 2:
            if len(known) >= KNOWN_MAX:
                known.clear()
            known[_parted(data[:size])[0]] = Known(self._status, headers.copy(), self._keep_alive)

    def read_on(self, call: Call) -> None:
        """Its sink takes more: begin with what was read before."""
        held, self._held = self._held, b""
        self._take_in_parts(call, held)

    def _take_in_parts(self, call: Call, data: bytes) -> None:
        for at in range(0, len(data), PART_BYTES):
            if self._call is not call:  # its answer has ended, and more has come that belongs to no call
                self.transport.abort()
                return
            if not call.reads:
                self._held = data[at:]
                return
            self._take(call, data[at : at + PART_BYTES])

    def pause_writing(self) -> None:
        """A request is written whole: nobody could wait."""

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


def _parted(head: bytes) -> tuple[bytes, bytes]:
    """A head with a 0 for its token counts, and these; one that does not spell them as usual stays as it is."""
    at = head.find(_COUNTS_LINE) + len(_COUNTS_LINE)
    if at < len(_COUNTS_LINE):
        return head, b""
    end = head.find(b"\r\n", at)
    counts = _counts(head[at:end])
    return (head[:at] + b"0" + head[end:], counts) if counts else (head, b"")


def _counts(value: bytes) -> bytes:
    """The same, if it is nothing but digits and commas; otherwise nothing."""
    return b"" if len(value) > _COUNTS_BYTES_MAX or value.translate(None, b"0123456789,") else value
