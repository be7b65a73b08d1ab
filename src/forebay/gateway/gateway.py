"""The request loop: read what a request wants, wait for a replica, relay, try again elsewhere, settle."""

import asyncio
import itertools
import re
import secrets
from random import Random
from typing import Final, NamedTuple

from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.model import GatewaySpec, Policy, Snapshot, Task
from forebay.core.routing import Route, Shed, Wait, choose
from forebay.gateway.accesslog import AccessLog, Line
from forebay.gateway.account import OK, Account
from forebay.gateway.asking import make_ask, wanted
from forebay.gateway.fleet import Link, Served
from forebay.gateway.relay import Relay
from forebay.net.server import Exchange
from forebay.obs.clock import wall_s
from forebay.obs.metrics import UNKNOWN, Metrics
from forebay.wire import http1
from forebay.wire.errors import error_body


class Endpoint(NamedTuple):
    """A path that replicas serve, and the start of the requests they get for it."""

    path: str
    task: Task
    head: bytes


def _endpoint(path: str, task: Task) -> Endpoint:
    head = f"POST {path} HTTP/1.1\r\nhost: forebay\r\ncontent-type: application/json\r\nx-forebay-gateway: 1\r\n"
    head += "x-request-id: "
    return Endpoint(path, task, head.encode())


ENDPOINTS: Final = {
    b"/v1/chat/completions": _endpoint("/v1/chat/completions", Task.CHAT),
    b"/v1/completions": _endpoint("/v1/completions", Task.CHAT),
    b"/v1/embeddings": _endpoint("/v1/embeddings", Task.EMBED),
}
COUNTING: Final = frozenset({Policy.ROUND_ROBIN, Policy.LEAST_REQUESTS, Policy.P2C})
"""Policies that look at no prompt."""
RESUMES_MAX: Final = 16
"""How often one stream goes on elsewhere. It had its place and its client waits, so more often than it is retried."""
STUCK_MAX: Final = 3
"""How often in a row without a single event in between: such a request may be what kills the engines."""
REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class Gateway:
    """Requests of the public listener, in flight and waiting. Replicas come and go by `fleet`."""

    def __init__(self, spec: GatewaySpec, metrics: Metrics, log: AccessLog, rng: Random) -> None:
        self.served: dict[str, Served] = {}
        self.snapshot: Snapshot | None = None
        self.response_buffer_bytes_max = spec.response_buffer_bytes_max
        self._retries_max = spec.retries_max
        self._metrics = metrics
        self._log = log
        self._rng = rng
        self._turn = 0
        self._id_start = secrets.token_hex(8).encode()
        self._id_count = itertools.count()
        self.now = asyncio.get_running_loop().time

    def _new_id(self) -> bytes:
        return b"req-%b%08x" % (self._id_start, next(self._id_count))

    def account(self, model: str) -> Account:
        """The account of a configured model."""
        return Account(self._metrics, model)

    # --- requests come in

    def handle(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Serve an inference request."""
        given = exchange.header(b"x-request-id")
        request_id = given if given and REQUEST_ID.fullmatch(given) else self._new_id()
        body = exchange.body
        try:
            request = wanted(body)
            served = self._served(request.model, endpoint.task)
        except Refusal as refusal:
            self.refuse(exchange, refusal, request_id)
            return
        exchange.body = b""  # it is kept once, inside the request
        relay = Relay(self, served, exchange, endpoint.path, request_id)
        if served.routes.policy not in COUNTING:
            relay.ask = make_ask(request, exchange, request_id, endpoint.task, served.lengths)
            relay.prompt_bytes = max(1, len(request.text))
            relay.streams = request.stream is True
        relay.request = b"%b%b\r\ncontent-length: %d\r\n\r\n%b" % (endpoint.head, request_id, len(body), body)
        self._admit(relay)

    def refuse(self, exchange: Exchange, refusal: Refusal, request_id: bytes = b"") -> None:
        """Answer a request that belongs to no model with an error."""
        request_id = request_id or self._new_id()
        status = TABLE[refusal.code].status
        headers = [http1.JSON, (b"x-request-id", request_id)]
        if refusal.code is Code.NO_REPLICA:
            headers.append((b"retry-after", b"1"))
        exchange.respond(status, headers, error_body(refusal))
        self.refused(refusal.code)
        self._log.add(
            Line("request", wall_s(), request_id.decode(), exchange.path[:256], "", status, refusal.code.value, 0)
        )

    def refused(self, code: Code) -> None:
        """Count an answer that belongs to no model."""
        self._metrics.counter("requests_total", UNKNOWN, code.value).inc()

    def _served(self, name: str, task: Task) -> Served:
        served = self.served.get(name)
        if served is None:
            if self.snapshot is None:
                raise Refusal(Code.NO_REPLICA, "The gateway does not know its models yet.")
            shown = name if len(name) <= 128 else f"{name[:128]}…"
            raise Refusal(Code.MODEL_NOT_FOUND, f"The model `{shown}` does not exist.", "model")
        if served.routes.task is not task:
            raise Refusal(
                Code.WRONG_TASK, f"The model `{name}` serves {served.routes.task} requests, not {task}.", "model"
            )
        return served

    # --- waiting and routing

    def _admit(self, relay: Relay) -> None:
        served = relay.served
        if not served.waiting:
            choice = self._choose(relay)
            if isinstance(choice, Route):
                self._send(relay, choice)
                return
        refused = served.waiting.enter(relay, relay.began)
        if refused is not None:
            relay.refuse(Refusal(refused.code), refused.retry_after_s)

    def _choose(self, relay: Relay) -> Route | Wait | Shed:
        served = relay.served
        return choose(
            served.routes.policy, served.links, relay.tried, self._rng, ask=relay.ask, pricing=served.pricing
        )

    def _send(self, relay: Relay, route: Route) -> None:
        served, now = relay.served, self.now()
        link = served.links[route.at]
        if relay.queued_s < 0:
            relay.queued_s = now - relay.began
            served.account.queue_wait.observe(relay.queued_s)
        self._turn += 1
        link.take(relay, self._turn)
        relay.route = route
        if relay.ask is not None:
            relay.charge = served.pricing.sent(link.meter, relay.ask, route.hit_tokens, relay.streams, now)
        relay.run_on(link)

    def pump(self, served: Served) -> None:
        """Send what waits, in order, as far as there is room."""
        waiting = served.waiting
        while waiting:
            for relay in waiting.waiting():
                choice = self._choose(relay)
                if isinstance(choice, Wait):
                    if not relay.tried:  # then nobody who has tried nothing can go either
                        return
                    continue
                waiting.leave(relay)
                if isinstance(choice, Route):
                    self._send(relay, choice)
                else:
                    relay.refuse(Refusal(Code.REPLICA_LOST, choice.why), choice.retry_after_s)
                break
            else:
                return

    def again(self, relay: Relay, reason: str, problem: Refusal) -> None:
        """An attempt failed before anything was sent to the client."""
        link, served = relay.link, relay.served
        assert link is not None
        link.give_back(relay)
        if relay.charge is not None:
            relay.charge.release()
        if reason == "connect":
            link.unheard()
        begun = relay.exchange.started
        failed = (link.id, link.generation)
        relay.tried = (*relay.tried, failed) if relay.stuck or not begun else (failed,)
        if not self._may_go_on(relay, reason):
            relay.refuse(problem, served.waiting.retry_after_s(self.now()))
            return
        choice = self._choose(relay)
        if isinstance(choice, Route):
            self._send(relay, choice)
        elif isinstance(choice, Shed) and not begun:
            relay.refuse(problem, choice.retry_after_s)
        else:
            if begun:  # a replica may come back as it is: its engine is replaced within seconds
                relay.tried = ()
            served.waiting.enter_again(relay, relay.deadline)

    def _may_go_on(self, relay: Relay, reason: str) -> bool:
        """Count another attempt, unless it is one too many."""
        account = relay.served.account
        if relay.exchange.started:
            if relay.resumes >= RESUMES_MAX or relay.stuck >= STUCK_MAX:
                return False
            relay.resumes += 1
            relay.stuck += not relay.refused
            relay.deadline = self.now() + relay.served.routes.queue_timeout_s  # it had its place: a wait begins anew
            account.resumed(reason).inc()
            return True
        if relay.retries >= self._retries_max or self.now() >= relay.deadline:
            return False
        relay.retries += 1
        account.retried(reason).inc()
        return True

    def over(self, relay: Relay, code: str, status: int, now: float) -> None:
        """A request has ended: free its place for the next one."""
        served, link = relay.served, relay.link
        if link is not None and link.give_back(relay):
            served.waiting.rate.count(now)
            if relay.charge is not None:
                self._learn(relay, link, code, now)
        else:
            served.waiting.leave(relay)
        self._log.add(relay.line(code, status, now))
        if served.waiting:
            self.pump(served)

    def _learn(self, relay: Relay, link: Link, code: str, now: float) -> None:
        """Take a request off its replica's account, and see how long it really took."""
        charge, ask = relay.charge, relay.ask
        assert charge is not None
        assert ask is not None
        if code != OK or not relay.usage[0]:
            charge.release()
            return
        prompt_tokens, output_tokens, cached_tokens = relay.usage
        if relay.served.routes.task is Task.EMBED:  # the answer is there when the prompt has been read
            charge.first_token(now, link.load)
        charge.done(now, link.load + 1, prompt_tokens, cached_tokens, output_tokens)
        relay.served.lengths.learn(relay.prompt_bytes, prompt_tokens, output_tokens)

    def expire(self) -> None:
        """Refuse what has waited too long, and send what can go."""
        now = self.now()
        for served in self.served.values():
            served.pricing.refresh([link.meter for link in served.links if link.live], now)
            if not served.waiting:
                continue
            for relay in served.waiting.expire(now):
                code = Code.QUEUE_TIMEOUT if served.ready else Code.NO_REPLICA
                relay.refuse(Refusal(code), served.waiting.retry_after_s(now))
            self.pump(served)
