"""The request loop: read what a request wants, wait for a replica, relay, try again elsewhere, settle."""

import asyncio
import itertools
import re
import secrets
from random import Random
from typing import Final, NamedTuple

import msgspec

from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.model import GatewaySpec, Snapshot, Task
from forebay.core.routing import Route, Shed, Wait, choose
from forebay.gateway.accesslog import AccessLog, Line
from forebay.gateway.account import Account
from forebay.gateway.fleet import Served
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
    head = f"POST {path} HTTP/1.1\r\nhost: forebay\r\ncontent-type: application/json\r\nx-request-id: "
    return Endpoint(path, task, head.encode())


ENDPOINTS: Final = {
    b"/v1/chat/completions": _endpoint("/v1/chat/completions", Task.CHAT),
    b"/v1/completions": _endpoint("/v1/completions", Task.CHAT),
    b"/v1/embeddings": _endpoint("/v1/embeddings", Task.EMBED),
}
REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
FIELD: Final = re.compile(r"(?:required field `|at `\$\.)([^`]*)`")


class Wanted(msgspec.Struct, gc=False):
    """The two fields that routing needs; the replica checks all the others."""

    model: str
    stream: bool | None = None


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
        self._decode = msgspec.json.Decoder(Wanted).decode
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
        try:
            served = self._wanted(exchange.body, endpoint.task)
        except Refusal as refusal:
            self.refuse(exchange, refusal, request_id)
            return
        body, exchange.body = exchange.body, b""  # it is kept once, inside the request
        relay = Relay(self, served, exchange, endpoint.path, request_id)
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

    def _wanted(self, body: bytes, task: Task) -> Served:
        try:
            name = self._decode(body).model
        except msgspec.ValidationError as error:
            field = FIELD.search(str(error))
            raise Refusal(Code.INVALID_REQUEST, f"{error}.", field[1] if field else None) from None
        except msgspec.DecodeError as error:
            raise Refusal(Code.INVALID_JSON, f"The body is not valid JSON: {error}.") from None
        except UnicodeDecodeError:
            raise Refusal(Code.INVALID_JSON, "The body is not valid UTF-8.") from None
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
            choice = choose(served.routes.policy, served.links, (), self._rng)
            if isinstance(choice, Route):
                self._send(relay, choice.at)
                return
        refused = served.waiting.enter(relay, relay.began)
        if refused is not None:
            relay.refuse(Refusal(refused.code), refused.retry_after_s)

    def _send(self, relay: Relay, index: int) -> None:
        link = relay.served.links[index]
        if relay.queued_s < 0:
            relay.queued_s = self.now() - relay.began
            relay.served.account.queue_wait.observe(relay.queued_s)
        self._turn += 1
        link.take(relay, self._turn)
        relay.run_on(link)

    def pump(self, served: Served) -> None:
        """Send what waits, in order, as far as there is room."""
        waiting = served.waiting
        while waiting:
            for relay in waiting.waiting():
                choice = choose(served.routes.policy, served.links, relay.tried, self._rng)
                if isinstance(choice, Wait):
                    if not relay.tried:  # then nobody who has tried nothing can go either
                        return
                    continue
                waiting.leave(relay)
                if isinstance(choice, Route):
                    self._send(relay, choice.at)
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
        if reason == "connect":
            link.unheard()
        relay.tried = (*relay.tried, (link.id, link.generation))
        if relay.retries >= self._retries_max or self.now() >= relay.deadline:
            relay.refuse(problem, served.waiting.retry_after_s(self.now()))
            return
        relay.retries += 1
        served.account.retried(reason).inc()
        match choose(served.routes.policy, served.links, relay.tried, self._rng):
            case Route(index):
                self._send(relay, index)
            case Wait():
                served.waiting.enter_again(relay, relay.deadline)
            case Shed(retry_after_s=retry_after_s):
                relay.refuse(problem, retry_after_s)

    def over(self, relay: Relay, code: str, status: int, now: float) -> None:
        """A request has ended: free its place for the next one."""
        served, link = relay.served, relay.link
        if link is not None and link.give_back(relay):
            served.waiting.rate.count(now)
        else:
            served.waiting.leave(relay)
        self._log.add(relay.line(code, status, now))
        if served.waiting:
            self.pump(served)

    def expire(self) -> None:
        """Refuse what has waited too long, and send what can go."""
        now = self.now()
        for served in self.served.values():
            if not served.waiting:
                continue
            for relay in served.waiting.expire(now):
                code = Code.QUEUE_TIMEOUT if served.ready else Code.NO_REPLICA
                relay.refuse(Refusal(code), served.waiting.retry_after_s(now))
            self.pump(served)
