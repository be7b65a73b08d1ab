"""The intake of requests: identify the caller, resolve the model, check limits, and hand over to the scheduler."""

from typing import Final

from forebay.core.dispatch import Chosen
from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.model import Snapshot
from forebay.core.tenancy import ANONYMOUS, Denied, Granted
from forebay.gateway.account import Account
from forebay.gateway.asking import Ids, expected_tokens, make_ticket, most_tokens, prepare
from forebay.gateway.dispatch.dispatching import addressed, missing_revision, read, serving
from forebay.gateway.dispatch.endpoints import Endpoint
from forebay.gateway.records import entries
from forebay.gateway.requests.relay import Relay
from forebay.gateway.scheduling.scheduler import Scheduler
from forebay.gateway.tenancy import AccessControl, Admitted, DeniedRefusal, credential
from forebay.net.server import Exchange
from forebay.obs.metrics import UNKNOWN, Metrics
from forebay.wire import http1
from forebay.wire.apis.request_fields import CODING, RequestFields, coded
from forebay.wire.errors import MESSAGES, MODELS, error_body, id_headers

ANTHROPIC: Final = b"anthropic-version"
"""A header that all requests of Anthropic's clients have."""


class Gateway:
    """The inference requests of the public listener, until `scheduler` has them or they get an error."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self.scheduler = scheduler
        self.served = scheduler.served
        self.dispatcher = scheduler.dispatcher
        self.now = scheduler.now
        self.snapshot: Snapshot | None = None
        self.access: AccessControl | None = None
        """Checks API keys and limits; None: no authentication, anyone may use any model."""
        self.id_of = Ids(scheduler.observations.instance.encode()).of
        self._metrics, self._log = metrics, scheduler.log

    def account(self, model: str) -> Account:
        """The metrics of a configured model."""
        return Account(self._metrics, model)

    def handle(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Serve an inference request."""
        request_id = self.id_of(exchange)
        body = exchange.body
        began = self.now()
        caller: Granted | None = None
        admitted: Admitted | None = None
        chosen: Chosen | None = None
        asked = ""
        try:
            caller = self._identify(exchange, began)
            tenant = caller.tenant if caller is not None else ANONYMOUS
            request = read(endpoint, exchange, body)
            asked = request.model
            if asked not in self.dispatcher.plain:
                task, also = endpoint.task, endpoint.also
                chosen = self.dispatcher.resolve(request, exchange, task, self.served, tenant, also=also)
                if chosen is not None and chosen.model != asked:
                    request.model = chosen.model
                    endpoint, body = addressed(endpoint, exchange, body, chosen.model)
            known = self.served.get(request.model)
            lengths = known.lengths if known is not None and endpoint.runs else None
            work_tokens = expected_tokens(request, lengths) if lengths is not None else 0.0
            if caller is not None:
                tokens_max = most_tokens(request, lengths, tenant) if lengths is not None else 0
                admitted = self._admit(caller, request, asked, tokens_max)
            served = serving(self.served, request.model, endpoint, loaded=self.snapshot is not None)
            if chosen is not None and (missing := missing_revision(served, chosen.revision)) is not None:
                raise missing
            routes = served.routes
            ready = not routes.drops_late or served.ready
            ticket = make_ticket(exchange, tenant, work_tokens=work_tokens, began=began, routes=routes, ready=ready)
        except Refusal as refusal:
            if admitted is not None:
                admitted.settle(0, began)
            self.refuse(exchange, coded(refusal, exchange.header(CODING)), request_id, caller=caller, asked=asked)
            return
        exchange.body = b""  # the only copy is kept inside the upstream request
        relay = Relay(self.scheduler, served, exchange, endpoint.path, request_id, ticket=ticket, began=began)
        if chosen is not None:
            relay.chosen, relay.revision = chosen, chosen.revision
            relay.asked = asked if asked != chosen.model else ""
        relay.admitted = admitted
        relay.client = self._log.client_of(exchange)
        relay.streams = request.stream
        prepare(relay, request, body, endpoint)
        self.scheduler.admit(relay)
        if request.stream:  # after the request has been sent upstream: its client waits for the first event
            exchange.rest()

    def refuse(
        self,
        exchange: Exchange,
        refusal: Refusal,
        request_id: bytes = b"",
        *more: http1.Header,
        caller: Granted | None = None,
        asked: str = "",
    ) -> None:
        """Answer a request that belongs to no model with an error; `caller` and `asked` as far as they are known."""
        request_id = request_id or self.id_of(exchange)
        headers = [http1.JSON, *id_headers(request_id, exchange.path), *more]
        if caller is not None and self.access is not None:
            headers += entries.parsed(self.access.limit_lines(caller.tenant, self.now()))
        if refusal.code is Code.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        default_s = 1 if refusal.code is Code.NO_REPLICA else 0
        retry_after_s = refusal.retry_after_s if isinstance(refusal, DeniedRefusal) else default_s
        if retry_after_s:
            headers.append((b"retry-after", b"%d" % retry_after_s))
        exchange.respond(TABLE[refusal.code].status, headers, error_body(refusal, _format_of(exchange)))
        self.refused(refusal.code)
        recorded = exchange.method == b"POST"
        self._log.refused(exchange, request_id, refusal.code, caller=caller, asked=asked, recorded=recorded)

    def refused(self, code: Code) -> None:
        """Count a response that belongs to no model."""
        self._metrics.counter("requests_total", UNKNOWN, code.value).inc()

    def refusal_id(self, seen: Exchange, code: Code) -> bytes:
        """Log an error that the listener answers itself: malformed heads, bodies too large or too late, too many
        connections. Returns the request id for the response."""
        request_id = self.id_of(seen)
        self._log.refused(seen, request_id, code)  # recorded for every method, as it is often unknown
        return request_id

    def _identify(self, exchange: Exchange, now: float) -> Granted | None:
        """The caller, where authentication is on. Raises `Refusal`."""
        if self.access is None:
            return None
        verdict = self.access.identify(credential(exchange.header), now)
        if isinstance(verdict, Denied):
            raise DeniedRefusal(verdict)
        return verdict

    def _admit(self, caller: Granted, request: RequestFields, asked: str, tokens_max: int) -> Admitted:
        """Check the allow-list, and reserve `tokens_max` within the limits. Raises `Refusal`.

        This comes before any response that reveals something about models.
        """
        assert self.access is not None
        verdict = self.access.admit(
            caller, request.model, tokens_max, request.stream is True, self.now(), asked=asked
        )
        if isinstance(verdict, Denied):
            self._metrics.counter("tenant_refusals_total", caller.tenant.name, verdict.code.value).inc()
            raise DeniedRefusal(verdict)
        return verdict


def _format_of(exchange: Exchange) -> str:
    """The path whose error format the client reads: both APIs have models."""
    path = exchange.path
    return MESSAGES if path.startswith(MODELS) and exchange.header(ANTHROPIC) is not None else path
