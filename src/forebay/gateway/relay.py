"""One request on its way: waiting, tried on a replica, answered. It ends, and is accounted for, exactly once.

When a replica is lost before anything was sent, the request is tried elsewhere. When it is lost in the middle of a
stream, another replica gets the request and the text that the client already has, and goes on from there.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from forebay.core.admission import Band, Ticket
from forebay.core.dispatch import Chosen
from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.resilience import Outcome, State
from forebay.core.routing import Ask, Charge, Route
from forebay.gateway.account import CLIENT_CLOSED, OK, UNTOLD, Tokens, begun, usage
from forebay.gateway.dispatch.stepping_in import step_back
from forebay.gateway.records.told import head_lines, refusal_headers
from forebay.gateway.tensor.answers import CODES, code_in, code_of, comes_whole, turned_away
from forebay.net.client import Call, CallError, Header
from forebay.net.server import Exchange
from forebay.wire import http1
from forebay.wire.errors import error_body, error_event, error_text, id_headers
from forebay.wire.records import Attempt
from forebay.wire.transcript import DONE, Transcript, ended, last_data

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from forebay.gateway.fleet import Link, Served
    from forebay.gateway.gateway import Gateway
    from forebay.gateway.hedging import Hedge
    from forebay.gateway.rollout.arms import Side
    from forebay.gateway.tenancy import Admitted

USAGE: Final = b"x-forebay-usage"
ERROR: Final = b"x-forebay-error"
"""Trailer of a stream that a worker cannot finish: the error code. Its value decides whether it goes on elsewhere."""
CONTINUE: Final = b"\r\nx-forebay-continue: %b\r\ncontent-length: %d\r\n\r\n"
OBJECT_ENDS: Final = (b"}", b"}\n")
"""How every whole answer ends: all of them are JSON objects."""
LENGTH: Final = b"\r\ncontent-length: "
RESUMABLE: Final = b"x-forebay-resumable"
"""Header `0` of a stream that no other replica could go on with."""
NOT_RELAYED: Final = frozenset(
    {
        b"connection", b"content-length", b"date", b"keep-alive", b"proxy-connection", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"x-forebay-retryable", b"x-request-id", RESUMABLE, USAGE,
    }
)  # fmt: skip
WAITING: Final = 0  # one by one: only so does compiled code have them for constants
WHOLE: Final = 1
EVENTS: Final = 2
BYTES: Final = 3
RETRY: Final = 4
FAILED: Final = 5
"""How the answer is handled: none yet, buffered, as events, as bytes because it is too large, thrown away because
the replica is to be replaced, thrown away because it ends the stream that it was to continue."""

TAIL_S: Final = 5.0
"""So long after its client has left, the token counts of a complete stream are waited for."""
ENDED: Final = -1
"""Mark of an attempt that its breaker has heard of already."""


class Relay:
    """An exchange and its attempts; the sink of the attempt that is under way."""

    # what most requests never change stays on the class: less to set for each of them
    link: "Link | None" = None
    queued_s = 0.0
    """How long it has waited for its attempts, all together."""
    free_at = 0.0
    """When its last attempt ended, or its last wait; 0: it had none."""
    problem: Refusal | None = None
    """What its last attempt failed of."""
    instead: tuple[Refusal, int] | None = None
    """What it would have been refused with, had no other model stepped in, and when to come back."""
    retries = 0
    tried: tuple[tuple[str, int], ...] = ()
    first_at = 0.0
    usage: Tokens = UNTOLD
    begun: Tokens = UNTOLD
    """What a worker said of the prompt when its stream began."""
    ask: Ask | None = None
    attempts: tuple[Attempt, ...] = ()
    route: Route | None = None
    charge: Charge | None = None
    chosen: Chosen | None = None
    asked = ""
    """The name in the request, if another one serves it."""
    revision = ""
    """Only replicas of this one may serve it."""
    streams = False
    session = b""
    """One that its client is given with the answer, to come back with."""
    limit = 0  # tokens of the longest answer that its client wants, if it names one
    prompt_bytes = 1
    text_bytes = 1
    """Those of them that tokens are estimated by."""
    since = 0.0
    mark = 0
    gave_way = False
    client = ""
    plain = False
    """Its answers are no events and need not be JSON: they are passed on as they come."""
    once = False
    """It must not be tried again."""
    admitted: "Admitted | None" = None
    report_age_s = 0.0
    hit = ""
    candidates: tuple[Raw, int] | None = None
    resumes = 0
    stuck = 0
    hedge_after_s = 0.0
    """When a second replica is asked too; 0: never."""
    timer: "TimerHandle | None" = None
    hedge: "Hedge | None" = None
    side: "Side | None" = None
    _call: Call | None = None
    _transcript: Transcript | None = None
    _mode = WAITING
    _over = False
    _heard = False
    """Whether an event of the attempt has come."""
    _status = 0
    _size = 0
    _error = ""
    _lines = b""  # for the head of its answer: made when a replica's is there, as no first event should wait for them
    _body: list[bytes]

    def __init__(
        self,
        gateway: "Gateway",
        served: "Served",
        exchange: Exchange,
        path: str,
        request_id: bytes,
        *,
        ticket: Ticket,
        began: float,
    ) -> None:
        self.gateway = gateway
        self.served = served
        self.exchange = exchange
        self.path = path
        self.request_id = request_id
        self.ticket = ticket
        self.began = began
        self.request = b""
        exchange.on_disconnect = self.client_gone

    def run_on(self, link: "Link") -> None:
        """Try it on a replica."""
        if self.attempts:  # what the last one said of itself is not said of this one
            self.usage, self._error = UNTOLD, ""
        self.link = link
        self._mode = WAITING
        self._size = 0
        self._call = link.pool.call(self._continuation() if self.exchange.started else self.request, self)

    def refuse(self, refusal: Refusal, retry_after_s: int = 0) -> None:
        """Answer with an error."""
        if self.exchange.started:
            self._interrupted(refusal.text if refusal.code is Code.STREAM_INTERRUPTED else "")
            return
        status = TABLE[refusal.code].status
        headers = [http1.JSON, *id_headers(self.request_id, self.path), *refusal_headers(self, self.gateway.now())]
        if retry_after_s:
            headers.append((b"retry-after", b"%d" % retry_after_s))
        self.exchange.respond(status, headers, error_body(refusal, self.path))
        self._end(refusal.code.value, status)

    def client_gone(self) -> None:
        """The client closed its connection: stop the work on its answer."""
        call = self._call
        if call is not None:
            if self._transcript is not None and ended(last_data(self._transcript.last)):
                # it has everything; only the token counts are still on their way
                call.resume()
                self.timer = asyncio.get_running_loop().call_later(TAIL_S, self.replica_lost)
                return
            call.cancel()
        self._end(CLIENT_CLOSED, 499)

    def replica_lost(self) -> None:
        """The replica has been silent for too long."""
        if self._call is not None:
            self._call.cancel()
        self.on_error(CallError("lost", True, "The replica does not answer any more."))

    @property
    def band(self) -> Band:
        """How urgent it is."""
        return self.ticket.band

    @property
    def yields(self) -> bool:
        """Whether its attempt may be stopped for a more urgent request: see `core.admission.RunningTicket`."""
        if not self.exchange.started:
            return self.ticket.band == Band.BATCH or not self.gave_way
        return self.ticket.band == Band.BATCH and self._transcript is not None and self._transcript.resumable

    def wait_on(self, until: float) -> None:
        """It had its place: it may wait anew, but past what its client has named only if its answer has begun."""
        ticket = self.ticket
        self.ticket = ticket.until(max(ticket.deadline, until if self.exchange.started else min(until, ticket.last)))

    @property
    def why(self) -> str:
        """Why the last attempt went where it went."""
        if self.route is None:
            return ""
        return self.route.why if self.side is None else self.route.why + self.side.note

    @property
    def as_stream(self) -> bool:
        """Whether its answer comes as a stream."""
        return self._transcript is not None

    @property
    def events(self) -> tuple[int, int]:
        """Events that the client was sent, and how many of them had text."""
        return (self._transcript.events, self._transcript.content_events) if self._transcript is not None else (0, 0)

    @property
    def told(self) -> tuple[int, int, int] | None:
        """Tokens by the worker's count; None if it has told none."""
        prompt, completion, cached = self.usage
        known = prompt or completion or (self.plain and cached is not None)  # what is no text has no tokens
        return (prompt, completion, cached or 0) if known else None

    def waited(self, now: float) -> None:
        """A wait is over: it is sent, or will not be."""
        wait_s = now - (self.free_at or self.began)
        self.free_at = now
        self.queued_s += wait_s
        self.served.account.queue_wait.observe(wait_s)

    def give_way(self) -> None:
        """Stop the attempt for a more urgent request; it waits again."""
        self.gave_way = True
        self.give_up()
        self.usage = UNTOLD

    def give_up(self) -> None:
        """Stop the attempt."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def trade_call(self, other: "Relay") -> None:
        """Each hears of the other's attempt from now on."""
        self._call, other._call = other._call, self._call
        for each in (self, other):
            each._mode = WAITING
            if each._call is not None:
                each._call.sink = each

    @property
    def unanswered(self) -> bool:
        """Whether nothing has come of the attempt under way."""
        return self._mode == WAITING

    @property
    def refused(self) -> bool:
        """Whether the last attempt was turned away, so that it tells nothing of the request."""
        return self._mode == RETRY

    # --- the sink of an attempt

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        if turned_away(status, headers):
            self._mode = RETRY
            self._body = []
            return
        if self.hedge is not None:
            self.gateway.hedged(self, won=False)
        if self.exchange.started:
            self._go_on(status, headers)
            return
        stream, resumable = False, True
        kept: list[Header] = []
        for pair in headers:
            name = pair[0]
            if name == USAGE:
                self.usage = usage(pair[1])
            elif name not in NOT_RELAYED:
                kept.append(pair)
                if name == b"content-type":
                    stream = pair[1].startswith(b"text/event-stream")
            elif name == RESUMABLE:
                resumable = pair[1] != b"0"
        self._lines = head_lines(self) + http1.fields(kept)
        if self.plain and not comes_whole(headers):
            self._mode = BYTES
            self._listen()
            self._start()
        elif stream and not self.plain:
            self._mode = EVENTS
            self.begun, self.usage = begun(self.usage, len(self.request)), UNTOLD
            self._transcript = Transcript(self.path, resumable=resumable)
            self._listen()  # the client is told when the first event is there: until then another replica may do it
        else:
            self._mode = WHOLE
            self._body = []

    def on_body(self, data: bytes) -> None:
        mode = self._mode
        if mode == EVENTS:
            assert self._transcript is not None
            whole = self._transcript.feed(data)
            if whole:
                if self.stuck:
                    self.stuck = 0
                if self._heard:
                    self.exchange.write(whole)
                else:
                    self._first(whole)
        elif mode == BYTES:
            self.exchange.write(data)
        elif mode != FAILED:
            self._size += len(data)
            self._body.append(data)
            if self._size > self.gateway.response_buffer_bytes_max:
                self._overflow()

    def on_end(self, trailers: list[Header]) -> None:
        self._call = None
        for name, value in trailers:
            if name == USAGE:
                self.usage = usage(value)
            elif name == ERROR:
                self._error = value.decode("latin-1")
        mode = self._mode
        if mode == WHOLE:
            body = self._body
            whole = body[0] if len(body) == 1 else b"".join(body)
            if self._status == 200 and not whole.endswith(OBJECT_ENDS) and not self.plain:  # its length was a lie
                self.on_error(CallError("protocol", True, "The answer is not complete."))
                return
            if self._status == 400 and step_back(self.gateway, self, code_in(whole, Code.INVALID_REQUEST)):
                return
            self.exchange.extra += self._lines
            self.exchange.respond(self._status, (), whole)
            self._end(OK if self._status < 400 else code_in(whole, code_of(self._status)), self._status)
        elif mode == RETRY:
            self._retry_refused()
        elif mode == FAILED:
            self._interrupted()
        elif self._error:
            if self._error not in CODES:  # of a worker that knows more of them, or of none
                self._error = Code.STREAM_INTERRUPTED.value
            self._broken(self._error)
        else:
            transcript = self._transcript
            if mode == EVENTS:
                assert transcript is not None
                if not ended(last_data(transcript.held or transcript.last)):
                    self.on_error(CallError("protocol", True, "The stream has no end."))
                    return
                if transcript.held:
                    self.exchange.write(transcript.held)
            self.exchange.end()
            self._end(OK, self._status)

    def on_error(self, error: CallError) -> None:
        self._call = None
        if self._mode == RETRY:
            self._retry_refused()
        elif not self.exchange.started:
            text = f"{TABLE[Code.REPLICA_LOST].text} {error.text}"
            self.gateway.again(self, error.kind, Refusal(Code.REPLICA_LOST, text))
        elif self._mode == FAILED:
            self._interrupted()
        else:
            self._broken(error.kind)

    # --- inside

    def _first(self, data: bytes) -> None:
        """The first event of an attempt has come."""
        self._heard = True
        if self.exchange.started:
            self.exchange.write(data)
        else:
            self._start(data)
        if self._over:  # the write found the client gone
            return
        now = self.gateway.now()
        self.first_at = self.first_at or now
        link, ttft_s = self.link, now - self.since
        assert link is not None
        if self.charge is not None:
            self.charge.first_token(now, link.load)
            ttft_s = self.charge.evened(ttft_s, self.served.lengths.prompt_tokens)
        link.breaker.brown_out.note_ttft(ttft_s, now)
        if link.breaker.state is State.HALF_OPEN:  # a long answer should not hold the place of a probe
            link.breaker.end(self.mark, Outcome.OK, now)
            self.mark = ENDED
            self.gateway.pump(self.served)  # who waits may be the next one on trial

    def _broken(self, reason: str) -> None:
        """The replica was lost after it had begun a stream: go on elsewhere, if that can be done."""
        if not self.exchange.started:
            self._error = ""
            self.gateway.again(self, reason, Refusal(Code.REPLICA_LOST))
            return
        transcript = self._transcript
        last, said = (last_data(transcript.last), transcript.state()) if transcript is not None else (b"", None)
        if self.exchange.finished or ended(last) or (said is not None and said.finished):
            if not ended(last):
                self.exchange.write(b"data: %b\n\n" % DONE)
            self.exchange.end()
            self._end(OK, self._status)
        elif last.startswith(b'{"error":'):  # the replica has told the client itself
            self.exchange.abort()
            self._end(code_in(last, Code.STREAM_INTERRUPTED), self._status)
        elif said is None or (self._error and not TABLE[Code(self._error)].retry):
            self._interrupted()
        else:
            self._error = ""
            self.gateway.again(self, reason, Refusal(Code.STREAM_INTERRUPTED))

    def _continuation(self) -> bytes:
        """The request for a replica that is to go on where the last one was lost."""
        assert self._transcript is not None
        said = self._transcript.state()
        assert said is not None
        head, _, body = self.request.partition(b"\r\n\r\n")
        length = len(body) + len(said.text)
        more = CONTINUE % (said.seam, length)
        return b"%b%b%b%b" % (head.rpartition(LENGTH)[0], more, body, said.text)

    def _go_on(self, status: int, headers: list[Header]) -> None:
        """A replica answers that was to continue a stream."""
        if status != 200 or not any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers):
            self._mode = FAILED
            return
        self._mode, self._heard = EVENTS, False
        self._listen()

    def _start(self, first: bytes = b"") -> None:
        self.exchange.extra += self._lines
        self.exchange.start(self._status, (), first)
        self.exchange.forget_head()
        self._lines = b""  # they have been sent, and a stream may last for hours

    def _listen(self) -> None:
        """The client's pace becomes that of the replica."""
        exchange, call = self.exchange, self._call
        assert call is not None
        exchange.source = call
        if exchange.paused:
            call.pause()

    def _overflow(self) -> None:
        """Too large to be kept: from here on the answer is passed on as it comes."""
        body, self._body = self._body, []
        if self._mode == RETRY:
            return
        self._mode = BYTES
        self._listen()
        self._start()
        self.exchange.write(b"".join(body))

    def _retry_refused(self) -> None:
        body = b"".join(self._body)
        code = code_in(body, Code.OVERLOADED)
        self.gateway.again(self, code, Refusal(Code(code), error_text(body)))

    def _interrupted(self, text: str = "") -> None:
        """The answer will not be complete: say so inside the stream, and cut it."""
        transcript = self._transcript
        if transcript is not None:
            event = error_event(Code.STREAM_INTERRUPTED, text, self.path, transcript.events)
            self.exchange.write((b"\n\n" if transcript.open else b"") + event)
        self.exchange.abort()
        self._end(Code.STREAM_INTERRUPTED.value, self._status)

    def _end(self, code: str, status: int) -> None:
        if self._over:  # a last write found the client gone, which has ended it
            return
        self._over = True
        self._call = None
        now = self.gateway.now()
        account = self.served.account
        if code == OK:
            account.answered(now - self.began)
        else:
            account.failed(code).inc()
        transcript = self._transcript
        if transcript is not None:
            account.events.inc(transcript.events)
            if self.first_at:
                account.streamed(self.first_at - self.began, now - self.first_at, self.usage[1])
        self.gateway.over(self, code, status, now)
