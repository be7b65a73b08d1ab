"""One request in the worker: however it ends, it ends and is counted exactly once."""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from forebay.core.errors import CLIENT_CLOSED, OK, TABLE, Blame, Code, Refusal
from forebay.net.replica_protocol import ERROR, GATEWAY, RESUMABLE, RETRYABLE, USAGE
from forebay.net.server import Exchange
from forebay.wire.errors import MESSAGES, error_body, error_event, id_headers
from forebay.wire.http1 import JSON
from forebay.wire.openai_answer import Usage
from forebay.worker.meters import Meters

EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
NO_CACHE = (b"cache-control", b"no-cache")


class Call:
    """An exchange with its request id, metrics and log lines. `ended` is called once, at the end."""

    def __init__(
        self,
        exchange: Exchange,
        endpoint: str,
        request_id: str,
        *,
        meters: Meters,
        log: structlog.stdlib.BoundLogger,
        ended: Callable[["Call"], None],
    ) -> None:
        self.exchange = exchange
        self.request_id = request_id
        self._endpoint = endpoint
        self._meters = meters
        self._log = log
        self._ended = ended
        self._began = asyncio.get_running_loop().time()
        self._blocked = False
        self.over = False

    def answer(self, body: bytes, usage: Usage | None) -> None:
        """Send a whole response; `usage` None: no model has run."""
        if self.over:
            return
        headers = [JSON, *self._id_headers()]
        if usage is not None:
            headers.append((USAGE, _usage_value(usage)))
        self.exchange.respond(200, headers, body)
        self._end(OK)

    def begin(self, usage: Usage | None, *, resumable: bool) -> None:
        """Send the head of a stream. `usage` is what is known of its tokens: the client may disconnect early.

        Gateways assign request ids themselves: without an id, the heads of streams are identical and can be cached. A
        stream that is not `resumable` is marked for the gateway: no other replica could continue it.
        """
        if self.over:
            return
        headers = [EVENT_STREAM, NO_CACHE]
        if not self._for_gateway or self.exchange.path.startswith(MESSAGES):
            headers += self._id_headers()
        if usage is not None:
            headers.append((USAGE, _usage_value(usage)))
        if self._for_gateway and not resumable:
            headers.append((RESUMABLE, b"0"))
        self.exchange.source = self
        self.exchange.start(200, headers)

    def write(self, data: bytes) -> None:
        """Send a part of a stream."""
        if not self.over:
            self.exchange.write(data)

    def finish(self, usage: Usage) -> None:
        """End a stream cleanly."""
        if not self.over:
            self.exchange.end([(USAGE, _usage_value(usage))])
            self._end(OK)

    def fail(self, refusal: Refusal, event: Callable[[Code, str], bytes] = error_event) -> None:
        """Respond with an error: as the response if nothing has been sent, else as `event` in the stream, which is
        then cut.

        A gateway gets it in a trailer instead, since the client may still get the whole response from another
        replica.
        """
        if self.over:
            return
        row = TABLE[refusal.code]
        if self.exchange.started and self._for_gateway:
            self.exchange.end([(ERROR, refusal.code.encode())])
        elif self.exchange.started:
            self.exchange.write(event(refusal.code, refusal.text))
            self.exchange.abort()
        else:
            retryable = [RETRYABLE] if row.retry else []
            body = error_body(refusal, self.exchange.path)
            self.exchange.respond(row.status, [JSON, *self._id_headers(), *retryable], body)
        facts = {"request_id": self.request_id, "endpoint": self._endpoint, "code": refusal.code.value}
        if row.blame is Blame.CLIENT:  # the text may quote the request, which must not be logged
            self._log.info("request refused", **facts, param=refusal.param)
        else:
            self._log.warning("request failed", **facts, reason=refusal.text)
        self._end(refusal.code)

    def gone(self) -> None:
        """The client disconnected before its response was complete, or was disconnected for not reading it."""
        if not self.over:
            code = Code.SLOW_CONSUMER.value if self._blocked else CLIENT_CLOSED
            self._log.info("client disconnected", request_id=self.request_id, endpoint=self._endpoint, code=code)
            self._end(code)

    def prompt_read(self, tokens: int, cached: int) -> None:
        """Count the prompt tokens that the engine has processed, whatever becomes of the response."""
        self._meters.prompt_tokens.inc(tokens)
        self._meters.cached_tokens.inc(cached)

    def first_token(self, now: float) -> None:
        """Record the time to first token."""
        self._meters.ttft.observe(now - self._began)

    def pace(self, seconds_per_token: float) -> None:
        """Record the time per output token of a choice, after its first."""
        self._meters.tpot.observe(seconds_per_token)

    def pause(self) -> None:
        """The client reads more slowly than we write."""
        self._blocked = True

    def resume(self) -> None:
        """The client has caught up."""
        self._blocked = False

    @property
    def _for_gateway(self) -> bool:
        return self.exchange.header(GATEWAY) == b"1"

    def _id_headers(self) -> list[tuple[bytes, bytes]]:
        return id_headers(self.request_id.encode("latin-1"), self.exchange.path)

    def _end(self, code: str) -> None:
        self.over = True
        self._meters.requests(self._endpoint, code).inc()
        if code == OK:
            elapsed = asyncio.get_running_loop().time() - self._began
            self._meters.e2e(self._endpoint).observe(elapsed)
        self._ended(self)


def failed(code: Code, text: str, param: str | None, names: Mapping[str, str]) -> Refusal:
    """The refusal for a `Failed` event; `names` maps engine parameters to the request's names."""
    name = names.get(param) if param is not None else None
    if param is None or name is None:
        return Refusal(code, text, param)
    return Refusal(code, text.replace(f"`{param}`", f"`{name}`"), name)


def _usage_value(usage: Usage) -> bytes:
    """Prompt tokens, completion tokens, and cached prompt tokens, the last empty if the engine cannot report them."""
    cached = b"" if usage.cached is None else b"%d" % usage.cached
    return b"%d,%d,%b" % (usage.prompt, usage.completion, cached)
