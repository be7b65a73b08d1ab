"""The HTTP side of a replica: endpoints for control and gateways, with the model server's own front behind them."""

import asyncio
import re
from typing import Final

import msgspec

from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.model import ReplicaState, WorkerSpec
from forebay.modelserver.http.front import HttpFront
from forebay.modelserver.replica.aliased import AliasedModel
from forebay.modelserver.replica.report import Reporter
from forebay.net.exchange import Exchange
from forebay.net.replica_protocol import RETRYABLE, UNIT
from forebay.obs.clock import new_id
from forebay.obs.metrics import CONTENT_TYPE, Metrics
from forebay.wire.errors import error_body
from forebay.wire.http1 import JSON, TEXT

REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
NO_ENDPOINT: Final = "none"
GETS: Final = frozenset({"/livez", "/readyz", "/load", "/metrics"})
BATCHES_MAX: Final = 4
"""A replica accepts at least this many times its concurrency, even beyond its queue limit."""


class ReplicaFront:
    """Handles the exchanges of a replica's server; `models` handles inference requests."""

    def __init__(
        self,
        spec: WorkerSpec,
        aliased: AliasedModel,
        reporter: Reporter,
        models: HttpFront,
        metrics: Metrics,
        *,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._spec = spec
        self._unit = b"%b.%d" % (spec.replica.encode(), spec.generation)
        self._aliased = aliased
        self._reporter = reporter
        self._models = models
        self._metrics = metrics
        self._tasks = tasks

    def handle(self, exchange: Exchange) -> None:
        """Handle one exchange, now or later."""
        path = exchange.path
        if path in GETS:
            if exchange.method in (b"GET", b"HEAD"):
                self._get(exchange, path)
            else:
                self._refuse(exchange, Refusal(Code.METHOD_NOT_ALLOWED), (b"allow", b"GET"))
            return
        exchange.extra += b"x-request-id: %b\r\n" % _request_id(exchange)
        if exchange.method == b"POST" and (code := self._closed(exchange)) is not None:
            self._refuse(exchange, Refusal(code), RETRYABLE)
        else:
            self._models.handle(exchange)

    def refused(self, code: Code) -> None:
        """Count bytes that never became a request, or a response that rejects it for lack of capacity."""
        labels = (self._spec.model, self._spec.replica, NO_ENDPOINT, code.value)
        self._metrics.counter("worker_requests_total", *labels).inc()

    def _closed(self, exchange: Exchange) -> Code | None:
        """Why this request is rejected at the moment, or None."""
        reporter, aliased = self._reporter, self._aliased
        if exchange.header(UNIT) not in (None, self._unit):
            return Code.OTHER_REPLICA
        if reporter.fenced:
            return Code.FENCED
        if reporter.draining:
            return Code.DRAINING
        if not aliased.ready:
            return Code.ENGINE_FAILED if reporter.capacity else Code.ENGINE_LOADING
        if aliased.in_flight >= self._spec.queue_max and aliased.in_flight >= BATCHES_MAX * reporter.capacity:
            return Code.OVERLOADED
        return None

    def _get(self, exchange: Exchange, path: str) -> None:
        match path:
            case "/livez":
                exchange.respond(200, [TEXT], b"ok\n")
            case "/readyz":
                state = self._reporter.state
                exchange.respond(200 if state is ReplicaState.READY else 503, [TEXT], state.encode() + b"\n")
            case "/load":
                self._reporter.asked_at = asyncio.get_running_loop().time()
                exchange.respond(200, [JSON], msgspec.json.encode(self._reporter.report()))
            case _:
                self._tasks.create_task(self._tell(exchange))

    async def _tell(self, exchange: Exchange) -> None:
        """Respond with the metrics, including the model's own."""
        exchange.respond(200, [(b"content-type", CONTENT_TYPE)], await self._reporter.render())

    def _refuse(self, exchange: Exchange, refusal: Refusal, header: tuple[bytes, bytes]) -> None:
        self.refused(refusal.code)
        exchange.respond(TABLE[refusal.code].status, [JSON, header], error_body(refusal))


def _request_id(exchange: Exchange) -> bytes:
    """The client's request id if it is safe in headers and logs, else a new one."""
    given = exchange.header(b"x-request-id")
    return given if given and REQUEST_ID.fullmatch(given) else new_id("req").encode()
