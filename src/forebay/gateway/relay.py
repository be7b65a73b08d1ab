"""One request from queue to response. It ends, and is accounted for, exactly once.

If the replica is lost before anything was sent to the client, the request is retried elsewhere. If it is lost in the
middle of a stream, another replica gets the request plus the text that the client already has, and continues from
there.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from forebay.core.admission import Band, Ticket
from forebay.core.dispatch import Chosen
from forebay.core.errors import CLIENT_CLOSED, OK, TABLE, Code, Refusal
from forebay.core.resilience import Outcome, State
from forebay.core.routing import Ask, Charge, Route
from forebay.gateway.account import UNREPORTED, Tokens, begun, usage
from forebay.gateway.dispatch.fallback import step_back
from forebay.gateway.records.entries import head_lines, refusal_headers
from forebay.gateway.tensor.answers import CODES, code_in, code_of, has_length, is_retryable
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
"""Trailer of a stream that a worker cannot finish: the error code, which decides whether another one resumes it."""
CONTINUE: Final = b"\r\nx-forebay-continue: %b\r\ncontent-length: %d\r\n\r\n"
OBJECT_ENDS: Final = (b"}", b"}\n")
"""How every complete response body ends: all of them are JSON objects."""
LENGTH: Final = b"\r\ncontent-length: "
RESUMABLE: Final = b"x-forebay-resumable"
"""Header with the value `0` on a stream that no other replica could resume."""
NOT_RELAYED: Final = frozenset(
    {
        b"connection", b"content-length", b"date", b"keep-alive", b"proxy-connection", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"x-forebay-retryable", b"x-request-id", RESUMABLE, USAGE,
    }
)  # fmt: skip
WAITING: Final = 0  # assigned one by one: only then does mypyc treat them as constants
WHOLE: Final = 1
EVENTS: Final = 2
BYTES: Final = 3
RETRY: Final = 4
FAILED: Final = 5
"""How the response is handled: not started, buffered, as SSE events, as bytes because it is too large, discarded
because the request will be retried, discarded because it does not continue the broken stream."""

TAIL_S: Final = 5.0
"""How long to wait for the token counts of a complete stream after its client has disconnected."""
ENDED: Final = -1
"""Mark of an attempt whose outcome its breaker already has."""


class Relay:
    """A client's exchange and its upstream attempts; the sink of the current attempt."""

    # defaults that most requests never change stay on the class: fewer assignments per request
    link: "Link | None" = None
    queued_s = 0.0
    """Total time spent queued before its attempts, in seconds."""
    free_at = 0.0
    """When its last attempt or its last wait ended; 0: neither has."""
    problem: Refusal | None = None
    """Why its last attempt failed."""
    instead: tuple[Refusal, int] | None = None
    """The error it would have got if no fallback model had taken over, and its retry-after in seconds."""
    retries = 0
    tried: tuple[tuple[str, int], ...] = ()
    first_at = 0.0
    usage: Tokens = UNREPORTED
    begun: Tokens = UNREPORTED
    """The token counts that a worker reported when its stream began."""
    ask: Ask | None = None
    attempts: tuple[Attempt, ...] = ()
    route: Route | None = None
    charge: Charge | None = None
    chosen: Chosen | None = None
    asked = ""
    """The model name in the request, if a different model serves it."""
    revision = ""
    """Only replicas of this revision may serve it; empty: any."""
    streams = False
    session = b""
    """A new session id, sent to the client as a cookie."""
    limit = 0  # max tokens over all choices; 0: the client set no limit
    prompt_bytes = 1
    text_bytes = 1
    """Bytes of the prompt that token estimates are based on."""
    since = 0.0
    mark = 0
    preempted = False
    client = ""
    plain = False
    """Responses are not SSE and need not be JSON: they are passed through."""
    once = False
    """It must not be retried."""
    admitted: "Admitted | None" = None
    report_age_s = 0.0
    hit = ""
    candidates: tuple[Raw, int] | None = None
    resumes = 0
    stuck = 0
    hedge_after_s = 0.0
    """Delay after which a hedge is sent to a second replica, in seconds; 0: never."""
    timer: "TimerHandle | None" = None
    hedge: "Hedge | None" = None
    side: "Side | None" = None
    _call: Call | None = None
    _transcript: Transcript | None = None
    _mode = WAITING
    _over = False
    _heard = False
    """Whether the current attempt has delivered an event."""
    _status = 0
    _size = 0
    _error = ""
    _lines = b""  # response header lines, built with the replica's head so as not to delay the first event
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
        """Start an attempt on a replica."""
        if self.attempts:  # token counts and errors of the last attempt do not apply to this one
            self.usage, self._error = UNREPORTED, ""
        self.link = link
        self._mode = WAITING
        self._size = 0
        self._call = link.pool.call(self._continuation() if self.exchange.started else self.request, self)

    def refuse(self, refusal: Refusal, retry_after_s: int = 0) -> None:
        """End it with an error response."""
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
        """The client disconnected: cancel the work on its response."""
        call = self._call
        if call is not None:
            if self._transcript is not None and ended(last_data(self._transcript.last)):
                # it has the whole response; only the token counts are still to come
                call.resume()
                self.timer = asyncio.get_running_loop().call_later(TAIL_S, self.replica_lost)
                return
            call.cancel()
        self._end(CLIENT_CLOSED, 499)

    def replica_lost(self) -> None:
        """The replica has not responded for too long."""
        if self._call is not None:
            self._call.cancel()
        self.on_error(CallError("lost", True, "The replica does not answer any more."))

    @property
    def band(self) -> Band:
        """Its priority band."""
        return self.ticket.band

    @property
    def yields(self) -> bool:
        """Whether its attempt may be preempted by a more urgent request: see `core.admission.RunningTicket`."""
        if not self.exchange.started:
            return self.ticket.band == Band.BATCH or not self.preempted
        return self.ticket.band == Band.BATCH and self._transcript is not None and self._transcript.resumable

    def extend_wait(self, until: float) -> None:
        """Extend its queue timeout after an attempt; past the client's deadline only if the response has begun."""
        ticket = self.ticket
        self.ticket = ticket.until(max(ticket.deadline, until if self.exchange.started else min(until, ticket.last)))

    @property
    def why(self) -> str:
        """Why the last attempt went to its replica."""
        if self.route is None:
            return ""
        return self.route.why if self.side is None else self.route.why + self.side.note

    @property
    def as_stream(self) -> bool:
        """Whether its response is a stream."""
        return self._transcript is not None

    @property
    def events(self) -> tuple[int, int]:
        """Events sent to the client, and how many of them had text."""
        return (self._transcript.events, self._transcript.content_events) if self._transcript is not None else (0, 0)

    @property
    def reported(self) -> tuple[int, int, int] | None:
        """Prompt, completion and cached tokens as the worker counted them; None if it reported none."""
        prompt, completion, cached = self.usage
        known = prompt or completion or (self.plain and cached is not None)  # input that is not text has no tokens
        return (prompt, completion, cached or 0) if known else None

    def waited(self, now: float) -> None:
        """A wait is over: the request is sent, or never will be."""
        wait_s = now - (self.free_at or self.began)
        self.free_at = now
        self.queued_s += wait_s
        self.served.account.queue_wait.observe(wait_s)

    def preempt(self) -> None:
        """Stop the attempt for a more urgent request; this one is queued again."""
        self.preempted = True
        self.give_up()
        self.usage = UNREPORTED

    def give_up(self) -> None:
        """Cancel the attempt."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def swap_calls(self, other: "Relay") -> None:
        """Swap the attempts of two relays: each becomes the sink of the other's call."""
        self._call, other._call = other._call, self._call
        for each in (self, other):
            each._mode = WAITING
            if each._call is not None:
                each._call.sink = each

    @property
    def unanswered(self) -> bool:
        """Whether no response head has come for the current attempt."""
        return self._mode == WAITING

    @property
    def refused(self) -> bool:
        """Whether the replica rejected the last attempt, which says nothing about the request itself."""
        return self._mode == RETRY

    # --- sink of an attempt

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        if is_retryable(status, headers):
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
        if self.plain and not has_length(headers):
            self._mode = BYTES
            self._listen()
            self._start()
        elif stream and not self.plain:
            self._mode = EVENTS
            self.begun, self.usage = begun(self.usage, len(self.request)), UNREPORTED
            self._transcript = Transcript(self.path, resumable=resumable)
            self._listen()  # the client gets nothing before the first event: until then another replica can take over
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
            if self._status == 200 and not whole.endswith(OBJECT_ENDS) and not self.plain:  # truncated
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
            if self._error not in CODES:  # an error code unknown here, or none
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
            self.gateway.attempt_failed(self, error.kind, Refusal(Code.REPLICA_LOST, text))
        elif self._mode == FAILED:
            self._interrupted()
        else:
            self._broken(error.kind)

    # --- internal

    def _first(self, data: bytes) -> None:
        """The first event of an attempt has come."""
        self._heard = True
        if self.exchange.started:
            self.exchange.write(data)
        else:
            self._start(data)
        if self._over:  # the write found the client disconnected
            return
        now = self.gateway.now()
        self.first_at = self.first_at or now
        link, ttft_s = self.link, now - self.since
        assert link is not None
        if self.charge is not None:
            self.charge.first_token(now, link.load)
            ttft_s = self.charge.evened(ttft_s, self.served.lengths.prompt_tokens)
        link.breaker.brown_out.note_ttft(ttft_s, now)
        if link.breaker.state is State.HALF_OPEN:  # a long response should not occupy the probe slot
            link.breaker.end(self.mark, Outcome.OK, now)
            self.mark = ENDED
            self.gateway.pump(self.served)  # a queued request may be the next probe

    def _broken(self, reason: str) -> None:
        """The replica was lost in the middle of a stream: resume it elsewhere if possible."""
        if not self.exchange.started:
            self._error = ""
            self.gateway.attempt_failed(self, reason, Refusal(Code.REPLICA_LOST))
            return
        transcript = self._transcript
        last, said = (last_data(transcript.last), transcript.state()) if transcript is not None else (b"", None)
        if self.exchange.finished or ended(last) or (said is not None and said.finished):
            if not ended(last):
                self.exchange.write(b"data: %b\n\n" % DONE)
            self.exchange.end()
            self._end(OK, self._status)
        elif last.startswith(b'{"error":'):  # the replica has already sent the client an error event
            self.exchange.abort()
            self._end(code_in(last, Code.STREAM_INTERRUPTED), self._status)
        elif said is None or (self._error and not TABLE[Code(self._error)].retry):
            self._interrupted()
        else:
            self._error = ""
            self.gateway.attempt_failed(self, reason, Refusal(Code.STREAM_INTERRUPTED))

    def _continuation(self) -> bytes:
        """The request for the replica that resumes the stream: the original plus the text so far."""
        assert self._transcript is not None
        said = self._transcript.state()
        assert said is not None
        head, _, body = self.request.partition(b"\r\n\r\n")
        length = len(body) + len(said.text)
        more = CONTINUE % (said.seam, length)
        return b"%b%b%b%b" % (head.rpartition(LENGTH)[0], more, body, said.text)

    def _go_on(self, status: int, headers: list[Header]) -> None:
        """The response head of a replica that was to resume a stream."""
        if status != 200 or not any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers):
            self._mode = FAILED
            return
        self._mode, self._heard = EVENTS, False
        self._listen()

    def _start(self, first: bytes = b"") -> None:
        self.exchange.extra += self._lines
        self.exchange.start(self._status, (), first)
        self.exchange.forget_head()
        self._lines = b""  # already sent, and a stream may last for hours

    def _listen(self) -> None:
        """Tie the replica's pace to the client's: backpressure."""
        exchange, call = self.exchange, self._call
        assert call is not None
        exchange.source = call
        if exchange.paused:
            call.pause()

    def _overflow(self) -> None:
        """Too large to buffer: pass the rest of the response through."""
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
        self.gateway.attempt_failed(self, code, Refusal(Code(code), error_text(body)))

    def _interrupted(self, text: str = "") -> None:
        """The response will not be complete: send an error event and cut the connection."""
        transcript = self._transcript
        if transcript is not None:
            event = error_event(Code.STREAM_INTERRUPTED, text, self.path, transcript.events)
            self.exchange.write((b"\n\n" if transcript.open else b"") + event)
        self.exchange.abort()
        self._end(Code.STREAM_INTERRUPTED.value, self._status)

    def _end(self, code: str, status: int) -> None:
        if self._over:  # a last write found the client disconnected, which ended it already
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
