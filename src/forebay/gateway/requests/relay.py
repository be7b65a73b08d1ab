"""One request from queue to response. It ends, and is accounted for, exactly once.

If the replica is lost before anything was sent to the client, the request is retried elsewhere. If it is lost in the
middle of a stream, another replica gets the request plus the text that the client already has, and continues from
there.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from forebay.core.admission import Ticket
from forebay.core.errors import CLIENT_CLOSED, OK, TABLE, Code, Refusal
from forebay.core.resilience import Outcome, State
from forebay.gateway.account import UNREPORTED, begun, usage
from forebay.gateway.asking import with_time_left
from forebay.gateway.dispatch.fallback import step_back
from forebay.gateway.records.entries import head_lines, refusal_headers
from forebay.gateway.requests.state import BYTES, EVENTS, FAILED, RETRY, WAITING, WHOLE, RequestState
from forebay.gateway.tensor.answers import CODES, code_in, code_of, has_length, is_retryable
from forebay.net.client import Call, CallError, Header
from forebay.net.replica_protocol import CONTINUE, DEADLINE, ERROR, RESUMABLE, RETRYABLE, USAGE
from forebay.net.server import Exchange
from forebay.wire import http1
from forebay.wire.errors import error_body, error_event, error_text, id_headers
from forebay.wire.transcript import DONE, Transcript, ended, last_data

if TYPE_CHECKING:
    from forebay.gateway.fleet import Served
    from forebay.gateway.link import Link
    from forebay.gateway.scheduling.scheduler import Scheduler

_CONTINUATION: Final = b"\r\n" + CONTINUE + b": %b\r\ncontent-length: %d\r\n\r\n"
OBJECT_ENDS: Final = (b"}", b"}\n")
"""How every complete response body ends: all of them are JSON objects."""
LAST_EVENT: Final = b"data: %b\n\n" % DONE
LENGTH: Final = b"\r\ncontent-length: "
NOT_RELAYED: Final = frozenset(
    {
        b"connection", b"content-length", b"date", b"keep-alive", b"proxy-connection", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"x-request-id", RESUMABLE, RETRYABLE[0], USAGE,
    }
)  # fmt: skip
TAIL_S: Final = 5.0
"""How long to wait for the token counts of a complete stream after its client has disconnected."""
ENDED: Final = -1
"""Mark of an attempt whose outcome its breaker already has."""


class Relay(RequestState):
    """A client's exchange and its upstream attempts; the sink of the current attempt."""

    # as in `RequestState`
    _call: Call | None = None
    _over = False
    _heard = False
    """Whether the current attempt has delivered an event."""
    _size = 0
    _error = ""
    _lines = b""  # response header lines, built with the replica's head so as not to delay the first event

    def __init__(
        self,
        scheduler: "Scheduler",
        served: "Served",
        exchange: Exchange,
        path: str,
        request_id: bytes,
        *,
        ticket: Ticket,
        began: float,
    ) -> None:
        super().__init__(served, exchange, path, request_id, ticket=ticket, began=began)
        self.scheduler = scheduler
        exchange.on_disconnect = self.client_gone

    def run_on(self, link: "Link") -> None:
        """Start an attempt on a replica."""
        if self.attempts:  # token counts and errors of the last attempt do not apply to this one
            self.usage, self._error = UNREPORTED, ""
        self.link = link
        self.mode = WAITING
        self._size = 0
        request = self._continuation() if self.exchange.started else self.request
        if self.exchange.header(DEADLINE) is not None:
            request = with_time_left(request, self.ticket.last - self.scheduler.now())
        self._call = link.pool.call(request, self, once=self.once)

    def refuse(self, refusal: Refusal, retry_after_s: int = 0) -> None:
        """End it with an error response."""
        if self.exchange.started:
            self._interrupted(refusal.text if refusal.code is Code.STREAM_INTERRUPTED else "")
            return
        status = TABLE[refusal.code].status
        headers = [http1.JSON, *id_headers(self.request_id, self.path), *refusal_headers(self, self.scheduler.now())]
        if retry_after_s:
            headers.append((b"retry-after", b"%d" % retry_after_s))
        self.exchange.respond(status, headers, error_body(refusal, self.path))
        self._end(refusal.code.value, status)

    def client_gone(self) -> None:
        """The client disconnected, or was disconnected because it did not read: cancel the work on its response."""
        call = self._call
        if call is not None:
            if self.transcript is not None and ended(last_data(self.transcript.last)):
                # it has the whole response; only the token counts are still to come
                call.resume()
                self.timer = asyncio.get_running_loop().call_later(TAIL_S, self.replica_lost)
                return
            call.cancel()
        if self.exchange.cut:
            self._end(Code.SLOW_CONSUMER.value, TABLE[Code.SLOW_CONSUMER].status)
        else:
            self._end(CLIENT_CLOSED, 499)

    def replica_lost(self) -> None:
        """The replica has not responded for too long."""
        if self._call is not None:
            self._call.cancel()
        self.on_error(CallError("lost", True, "The replica does not answer any more."))

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
            each.mode = WAITING
            if each._call is not None:
                each._call.sink = each

    # --- sink of an attempt

    def on_head(self, status: int, headers: list[Header]) -> None:
        self.status = status
        if is_retryable(status, headers):
            self.mode = RETRY
            self.body = []
            return
        if self.hedge is not None:
            self.scheduler.end_hedge(self, won=False)
        if self.exchange.started:
            self._on_resumed_head(status, headers)
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
            self.mode = BYTES
            self._listen()
            self._start()
        elif stream and not self.plain:
            self.mode = EVENTS
            self.begun, self.usage = begun(self.usage, len(self.request)), UNREPORTED
            self.transcript = Transcript(self.path, resumable=resumable)
            self._listen()  # the client gets nothing before the first event: until then another replica can take over
        else:
            self.mode = WHOLE
            self.body = []

    def on_body(self, data: bytes) -> None:
        mode = self.mode
        if mode == EVENTS:
            assert self.transcript is not None
            whole = self.transcript.feed(data)
            if whole:
                if self.stuck:
                    self.stuck = 0
                if self._heard:
                    self.exchange.write(whole)
                else:
                    self._first(whole)
        elif mode == BYTES:
            self.exchange.write(data)
        else:
            self._size += len(data)
            self.body.append(data)
            if self._size > self.scheduler.response_buffer_bytes_max:
                self._overflow()

    def on_end(self, trailers: list[Header]) -> None:
        self._call = None
        for name, value in trailers:
            if name == USAGE:
                self.usage = usage(value)
            elif name == ERROR:
                self._error = value.decode("latin-1")
        mode = self.mode
        if mode == WHOLE:
            body = self.body
            whole = body[0] if len(body) == 1 else b"".join(body)
            if self.status == 200 and not whole.endswith(OBJECT_ENDS) and not self.plain:  # truncated
                self.on_error(CallError("protocol", True, "The answer is not complete."))
                return
            if self.status == 400 and step_back(self.scheduler, self, code_in(whole, Code.INVALID_REQUEST)):
                return
            self.exchange.extra += self._lines
            self.exchange.respond(self.status, (), whole)
            self._end(OK if self.status < 400 else code_in(whole, code_of(self.status)), self.status)
        elif mode == RETRY:
            self._retry_refused()
        elif mode == FAILED and self.status == 200:
            self.on_error(CallError("protocol", True, "The response is no stream."))
        elif mode == FAILED:
            code = code_in(b"".join(self.body), code_of(self.status))
            self.scheduler.attempt_rejected(self, code, self.scheduler.now())
            self._interrupted()
        elif self._error:
            if self._error not in CODES:  # an error code unknown here, or none
                self._error = Code.STREAM_INTERRUPTED.value
            self._broken(self._error)
        else:
            transcript = self.transcript
            if mode == EVENTS:
                assert transcript is not None
                if not ended(last_data(transcript.held or transcript.last)):
                    self.on_error(CallError("protocol", True, "The stream has no end."))
                    return
                if transcript.held:
                    self.exchange.write(transcript.held)
            self.exchange.end()
            self._end(OK, self.status)

    def on_error(self, error: CallError) -> None:
        self._call = None
        if self.mode == RETRY:
            self._retry_refused()
        elif not self.exchange.started:
            text = f"{TABLE[Code.REPLICA_LOST].text} {error.text}"
            self.scheduler.attempt_failed(self, error.kind, Refusal(Code.REPLICA_LOST, text))
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
        now = self.scheduler.now()
        self.first_at = self.first_at or now
        link, ttft_s = self.link, now - self.since
        assert link is not None
        if self.charge is not None:
            self.charge.first_token(now, link.load)
            ttft_s = self.charge.normalised_ttft(ttft_s, self.served.lengths.prompt_tokens)
        link.breaker.brown_out.note_ttft(ttft_s, now)
        if link.breaker.state is State.HALF_OPEN:  # a long response should not occupy the probe slot
            link.breaker.end(self.mark, Outcome.OK, now)
            self.mark = ENDED
            self.scheduler.pump(self.served)  # a queued request may be the next probe

    def _broken(self, reason: str) -> None:
        """The replica was lost in the middle of a stream: resume it elsewhere if possible."""
        if not self.exchange.started:
            self._error = ""
            self.scheduler.attempt_failed(self, reason, Refusal(Code.REPLICA_LOST))
            return
        transcript = self.transcript
        last, said = (last_data(transcript.last), transcript.state()) if transcript is not None else (b"", None)
        if self.exchange.finished or ended(last) or (said is not None and said.finished):
            if not ended(last):
                self.exchange.write(LAST_EVENT)
            self.exchange.end()
            self._end(OK, self.status)
        elif last.startswith(b'{"error":'):  # the replica has already sent the client an error event
            self.exchange.abort()
            self._end(code_in(last, Code.STREAM_INTERRUPTED), self.status)
        elif said is None or (self._error and not TABLE[Code(self._error)].retry):
            self._interrupted()
        else:
            self._error = ""
            self.scheduler.attempt_failed(self, reason, Refusal(Code.STREAM_INTERRUPTED))

    def _continuation(self) -> bytes:
        """The request for the replica that resumes the stream: the original plus the text so far."""
        assert self.transcript is not None
        said = self.transcript.state()
        assert said is not None
        head, _, body = self.request.partition(b"\r\n\r\n")
        length = len(body) + len(said.text)
        more = _CONTINUATION % (said.seam, length)
        return b"%b%b%b%b" % (head.rpartition(LENGTH)[0], more, body, said.text)

    def _on_resumed_head(self, status: int, headers: list[Header]) -> None:
        """The response head of the replica that is to resume a stream."""
        if status != 200 or not any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers):
            self.mode, self.body = FAILED, []
            return
        assert self.transcript is not None
        self.transcript.end = b""  # it may say more
        self.mode, self._heard = EVENTS, False
        self._listen()

    def _start(self, first: bytes = b"") -> None:
        self.exchange.extra += self._lines
        self.exchange.start(self.status, (), first)
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
        body, self.body = self.body, []
        if self.mode in {RETRY, FAILED}:
            return
        self.mode = BYTES
        self._listen()
        self._start()
        self.exchange.write(b"".join(body))

    def _retry_refused(self) -> None:
        body = b"".join(self.body)
        code = code_in(body, Code.OVERLOADED)
        self.scheduler.attempt_failed(self, code, Refusal(Code(code), error_text(body)))

    def _interrupted(self, text: str = "") -> None:
        """The response will not be complete: send an error event and cut the connection."""
        transcript = self.transcript
        if transcript is not None and transcript.end:  # only the token counts are missing
            self.exchange.write(transcript.end + LAST_EVENT)
            self.exchange.end()
            self._end(OK, self.status)
            return
        if transcript is not None:
            event = error_event(Code.STREAM_INTERRUPTED, text, self.path, transcript.events)
            self.exchange.write((b"\n\n" if transcript.open else b"") + event)
        self.exchange.abort()
        self._end(Code.STREAM_INTERRUPTED.value, self.status)

    def _end(self, code: str, status: int) -> None:
        if self._over:  # a last write found the client disconnected, which ended it already
            return
        self._over = True
        self._call = None
        now = self.scheduler.now()
        account = self.served.account
        if code == OK:
            account.answered(now - self.began)
        else:
            account.failed(code).inc()
        transcript = self.transcript
        if transcript is not None:
            account.events.inc(transcript.events)
            if self.first_at:
                account.streamed(self.first_at - self.began, now - self.first_at, self.usage[1] // self.parallel)
        self.scheduler.end_request(self, code, status, now)
