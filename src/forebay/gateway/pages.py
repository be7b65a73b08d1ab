"""Endpoints that the gateway answers itself: models, health, metrics, its OpenAPI document."""

import asyncio
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from forebay import __version__
from forebay.core.errors import Code, Refusal
from forebay.core.model import Endpoint, GatewaySpec, Task
from forebay.core.resilience import State
from forebay.core.tenancy import Denied
from forebay.gateway.asking import address_of
from forebay.gateway.dispatch import endpoints
from forebay.gateway.dispatch.endpoints import ENDPOINTS
from forebay.gateway.gateway import Gateway
from forebay.gateway.pressure.counting import pressure
from forebay.gateway.tenancy import DeniedRefusal, credential
from forebay.gateway.tensor import protocol
from forebay.gateway.tensor import requests as tensor
from forebay.net.cors import Cors, is_foreign
from forebay.net.fetching import NoAnswer, fetch_once
from forebay.net.server import Exchange, HttpServer
from forebay.obs.clock import wall_s
from forebay.obs.metrics import CONTENT_TYPE, PREFIX, TABLE, Metrics
from forebay.wire import http1
from forebay.wire.documents import UNREADABLE
from forebay.wire.errors import INFERENCE, MODELS, id_headers
from forebay.wire.openapi import document, public
from forebay.wire.prometheus import check, together

PEER_TIMEOUT_S: Final = 1.0
SCRAPES_MAX: Final = 8
GETS: Final = frozenset({"/livez", "/readyz", "/metrics", MODELS, document.PATH})
REPLICA_GAUGES: Final = tuple(row.name for row in TABLE if row.name.startswith("replica_") and row.kind == "gauge")
MODEL_GAUGES: Final = ("queue_depth", "in_flight", "resume_text_bytes")
TENANTS: Final = b"|".join((PREFIX + row.name).encode() for row in TABLE if "tenant" in row.labels)
NAMES_TENANTS: Final = re.compile(rb"^(?:# (?:HELP|TYPE) )?(?:%b)\b.*\n" % TENANTS, re.MULTILINE)
"""Lines of a metrics exposition that are for the operator only."""
PROXIED: Final = (b"x-forwarded-for", b"forwarded", b"via")
"""Headers of requests that a proxy passes on: their client may be anywhere."""
_ELSEWHERE: Final = Denied(
    Code.MODEL_NOT_ALLOWED, "Metrics are for clients on the gateway's own machine (`gateway.metrics: local`)."
)
_RESTRICTED: Final = Denied(
    Code.MODEL_NOT_ALLOWED, "Metrics name every model; this takes the API key of a tenant that may use all models."
)
_STRANGE_PAGE: Final = (
    "Web pages of this origin may not make requests; list it in `gateway.cors_origins`, or require keys "
    "(`gateway.auth: keys`)."
)
WHOSE: Final = "gateway"
"""The label that every metric on the public page gets."""


class Pages:
    """Handlers of the public and of the private listener. Scrapes of peers run in tasks of `group`."""

    def __init__(
        self,
        gateway: Gateway,
        spec: GatewaySpec,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        cors: Cors | None = None,
    ) -> None:
        self._gateway = gateway
        self._spec = spec
        self._metrics = metrics
        self._group = group
        self._cors = cors
        host = address_of(spec.host)
        self._guards = spec.tenancy is None and (spec.host == "localhost" or (host is not None and host.is_loopback))
        """Whether only being on this machine protects it: then any page in a browser here could use it."""
        self._created = int(wall_s())
        self._scrapes = 0
        self._document = public.document(__version__, keys=spec.tenancy is not None)
        self.public: HttpServer | None = None
        self.draining = False
        metrics.gauge("build_info", __version__, "gateway").set(1)

    def handle(self, exchange: Exchange) -> None:
        """Handle a request of the public listener."""
        endpoint = ENDPOINTS.get(exchange.target) or _find(exchange)
        if self._cors is not None and self._cors.answers(exchange):
            return
        if endpoint is None:
            self._page(exchange)
        elif exchange.method != endpoint.method:
            self._refuse_method(exchange, endpoint.method)
        elif self._guards and (origin := exchange.header(b"origin")) is not None and self._is_foreign(origin):
            self._gateway.refuse(exchange, Refusal(Code.INVALID_REQUEST, _STRANGE_PAGE, "origin"))
        else:
            self._gateway.handle(exchange, endpoint)

    def _is_foreign(self, origin: bytes) -> bool:
        return is_foreign(origin) and not (self._cors is not None and self._cors.allows(origin))

    def refusal_id(self, seen: Exchange, code: Code) -> bytes:
        """As `Gateway.refusal_id`; a page that may use the API may read these errors, too."""
        if self._cors is not None:
            self._cors.answers(seen)
        return self._gateway.refusal_id(seen, code)

    def wants_body(self, exchange: Exchange) -> bool:
        """Whether to read the body of a public request: only inference requests with a valid key are worth it."""
        if exchange.method != b"POST" or _find(exchange) is None:
            return False
        access = self._gateway.access
        if access is None:
            return True
        return not isinstance(access.identify(credential(exchange.header), self._gateway.now()), Denied)

    def handle_private(self, exchange: Exchange) -> None:
        """Handle a request of control or of a peer: this process's own health, metrics and load."""
        if exchange.path == "/metrics" and exchange.method == b"GET":
            exchange.respond(200, [(b"content-type", CONTENT_TYPE)], self.render())
        elif exchange.path == "/livez" and exchange.method == b"GET":
            exchange.respond(200, [http1.TEXT], b"ok\n")
        elif exchange.path == "/pressure" and exchange.method == b"GET":
            _json(exchange, 200, pressure(self._gateway.scheduler, self._metrics))
        elif exchange.path == "/observations" and exchange.method == b"GET":
            _json(exchange, 200, self._gateway.scheduler.observations.asked(exchange.target))
        elif exchange.path == "/demand" and exchange.method == b"GET" and self._gateway.access is not None:
            exchange.respond(200, [http1.JSON], msgspec.json.encode(self._gateway.access.demand()))
        else:
            self._gateway.refuse(exchange, Refusal(Code.NOT_FOUND))

    def render(self) -> bytes:
        """This process's metrics, after updating its gauges."""
        metrics = self._metrics
        metrics.gauge("open_connections").set(self.public.connections if self.public else 0)
        shown: set[tuple[str, ...]] = set()
        for name, served in self._gateway.served.items():
            metrics.gauge("queue_depth", name).set(len(served.waiting))
            metrics.gauge("in_flight", name).set(served.in_flight)
            metrics.gauge("resume_text_bytes", name).set(served.resume_text_bytes)
            shown.add((name,))
            for link in served.links:
                shown.add((name, link.id))
                metrics.gauge("replica_up", name, link.id).set(link.live)
                metrics.gauge("replica_in_flight", name, link.id).set(len(link.attempts))
                metrics.gauge("replica_queue_tokens", name, link.id).set(link.meter.queue_tokens)
                metrics.gauge("replica_trust", name, link.id).set(link.meter.trust)
                metrics.gauge("replica_handicap", name, link.id).set(link.meter.handicap)
                for state in State:
                    metrics.gauge("replica_breaker", name, link.id, state).set(link.breaker.state is state)
        for gauge in (*MODEL_GAUGES, *REPLICA_GAUGES):
            for labels in metrics.labels(gauge):
                if labels[:2] not in shown:
                    metrics.forget(gauge, *labels)
        return metrics.render()

    def missing(self) -> list[dict[str, str]]:
        """Models that cannot be served now, and why."""
        if self._gateway.snapshot is None:
            return [{"model": "", "reason": "no snapshot has been read yet"}]
        return [
            {
                "model": name,
                "reason": ", ".join(f"{link.id} is {link.state}" for link in served.links) or "no replica",
            }
            for name, served in self._gateway.served.items()
            if not served.serves
        ]

    def _page(self, exchange: Exchange) -> None:
        path = exchange.path
        if path.startswith(INFERENCE):
            self._protocol(exchange, path)
        elif path not in GETS and not path.startswith(MODELS + "/"):
            self._gateway.refuse(exchange, Refusal(Code.NOT_FOUND, f"No such path: {path[:256]}"))
        elif exchange.method not in (b"GET", b"HEAD"):
            self._refuse_method(exchange, b"GET")
        elif path == "/livez":
            exchange.respond(200, [http1.TEXT], b"ok\n")
        elif path == "/readyz":
            self._readyz(exchange)
        elif path == "/metrics":
            self._scrape(exchange)
        elif path == document.PATH:
            exchange.respond(200, [http1.JSON], self._document)
        elif isinstance(allowed := self._allowed(exchange), Refusal):
            self._gateway.refuse(exchange, allowed)
        elif path == MODELS:
            self._tell(exchange, _list([self._model(*each) for each in allowed.items()]))
        else:
            name = unquote(path[len(MODELS) + 1 :])
            if name in allowed:
                self._tell(exchange, self._model(name, allowed[name]))
            else:
                text = f"The model `{name[:128]}` does not exist."
                self._gateway.refuse(exchange, Refusal(Code.MODEL_NOT_FOUND, text, "model"))

    def _protocol(self, exchange: Exchange, path: str) -> None:
        """Answer the server and model metadata endpoints of the Open Inference Protocol."""
        try:
            ready = not self.draining and not self.missing()
            exchange.respond(*protocol.answer(exchange, path, self._tensor_models, ready=ready))
        except Refusal as refusal:
            allow = [(b"allow", b"")] if refusal.code is Code.METHOD_NOT_ALLOWED else []
            self._gateway.refuse(exchange, refusal, b"", *allow)

    def _tensor_models(self, exchange: Exchange) -> dict[str, bool]:
        """The tensor models that the caller may use, and whether they are ready. Raises `Refusal`."""
        allowed = self._allowed(exchange)
        if isinstance(allowed, Refusal):
            raise allowed
        served = self._gateway.served
        return {
            name: any(served[each].serves for each in models)
            for name, models in sorted(allowed.items())
            if models and all(each in served and served[each].routes.task is Task.TENSOR for each in models)
        }

    def _allowed(self, exchange: Exchange) -> dict[str, tuple[str, ...]] | Refusal:
        """The names that the caller may use, with the models that each may resolve to."""
        access = self._gateway.access
        names = {**{name: (name,) for name in self._gateway.served}, **self._gateway.dispatcher.names}
        if access is None:
            return names
        caller = access.identify(credential(exchange.header), self._gateway.now())
        if isinstance(caller, Denied):
            return DeniedRefusal(caller)
        return {name: models for name, models in names.items() if any(map(caller.tenant.may_use, models))}

    def _tell(self, exchange: Exchange, value: Any) -> None:
        """Answer with JSON and the request id, as OpenAI's API does."""
        headers = [http1.JSON, *id_headers(self._gateway.id_of(exchange), exchange.path)]
        exchange.respond(200, headers, msgspec.json.encode(value))

    def _model(self, name: str, models: tuple[str, ...]) -> dict[str, str | int]:
        """A model in the format of OpenAI's API and of Anthropic's."""
        since = datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        shown: dict[str, str | int] = {
            "id": name, "object": "model", "created": self._created, "owned_by": "forebay",
            "type": "model", "display_name": name, "created_at": since,
        }  # fmt: skip
        tasks = {self._gateway.served[each].routes.task.value for each in models if each in self._gateway.served}
        if len(tasks) == 1:
            shown["task"] = tasks.pop()
        return shown if models == (name,) or len(models) > 1 else {**shown, "parent": models[0]}

    def _refuse_method(self, exchange: Exchange, allowed: bytes) -> None:
        text = f"{exchange.path[:256]} takes {allowed.decode()}, not {exchange.method.decode('latin-1')}."
        allow = b"GET, HEAD" if allowed == b"GET" else allowed  # RFC 9110, 15.5.6: a 405 names what is allowed
        self._gateway.refuse(exchange, Refusal(Code.METHOD_NOT_ALLOWED, text), b"", (b"allow", allow))

    def _denial(self, exchange: Exchange) -> Denied | None:
        """Why the caller may not see the names of all models and replicas; None: it may."""
        access, whose = self._gateway.access, self._spec.metrics
        if whose == "open" or is_local(exchange):
            return None
        if whose == "local":
            return _ELSEWHERE
        if access is None:
            return None
        caller = access.identify(credential(exchange.header), self._gateway.now())
        if isinstance(caller, Denied):
            return caller
        return None if "*" in caller.tenant.models else _RESTRICTED

    def _readyz(self, exchange: Exchange) -> None:
        missing = self.missing()
        if self.draining:
            _json(exchange, 503, {"status": "draining"})
        elif missing:
            named = {} if self._denial(exchange) else {"missing": missing}
            _json(exchange, 503, {"status": "not ready", **named})
        else:
            _json(exchange, 200, {"status": "ready"})

    def _scrape(self, exchange: Exchange) -> None:
        denied = self._denial(exchange)
        if denied is not None:
            self._gateway.refuse(exchange, Refusal(denied.code, denied.text))
            return
        try:
            others = peers(self._spec)
        except OSError as error:  # without those of the others, counters would seem to be reset
            self._gateway.refuse(exchange, Refusal(Code.INTERNAL, f"The other gateways are unknown: {error}"))
            return
        if not others or self._scrapes >= SCRAPES_MAX:
            self._show(exchange, {})
            return
        self._scrapes += 1
        self._group.create_task(self._scrape_all(exchange, others))

    async def _scrape_all(self, exchange: Exchange, others: Mapping[str, Endpoint]) -> None:
        """Answer with the metrics of all processes that answer in time."""
        try:
            texts = await asyncio.gather(*map(self._ask, others.values()))
            self._show(exchange, {id: text for id, text in zip(others, texts, strict=True) if text})
        finally:
            self._scrapes -= 1

    def _show(self, exchange: Exchange, others: Mapping[str, str]) -> None:
        everything = together({self._spec.id: self.render().decode(), **others}, WHOSE).encode()
        exchange.respond(200, [(b"content-type", CONTENT_TYPE)], NAMES_TENANTS.sub(b"", everything))

    async def _ask(self, peer: Endpoint) -> str:
        """A peer's metrics; empty if it does not answer, or not with valid metrics."""
        page = await fetch_once(peer.host, peer.port, b"/metrics", PEER_TIMEOUT_S)
        try:
            text = "" if isinstance(page, NoAnswer) else page.decode()
            check(text)
        except ValueError:
            return ""
        return text


def _find(exchange: Exchange) -> endpoints.Endpoint | None:
    """The replica endpoint of a request, if any. A target in absolute form, as sent to proxies, is rewritten to a
    path."""
    exchange.target = target = http1.origin_form(exchange.target)  # RFC 9112, 3.2.2: servers must accept both
    return ENDPOINTS.get(target.partition(b"?")[0]) or tensor.find(exchange)


def is_local(exchange: Exchange) -> bool:
    """Whether a request comes from this machine: over loopback, and not through a proxy."""
    address = address_of(exchange.peer)
    return address is not None and address.is_loopback and not any(exchange.header(name) for name in PROXIED)


def peers(spec: GatewaySpec) -> dict[str, Endpoint]:
    """Private endpoints of the cluster's other gateway processes, by id; without those that are gone.

    Raises OSError.
    """
    found = {}
    for path in sorted(Path(spec.peers_dir).glob("*.json")):
        if path.stem != spec.id and (endpoint := running(path)) is not None:
            found[path.stem] = endpoint
    return found


def running(path: Path) -> Endpoint | None:
    """The endpoint that a gateway process published at `path`; None if the process is gone."""
    try:
        endpoint = msgspec.json.decode(path.read_bytes(), type=Endpoint)
        os.kill(endpoint.pid, 0)
    except (OSError, OverflowError, *UNREADABLE):  # OverflowError: a number that is no process id
        return None
    return endpoint


def write(path: Path, endpoint: Endpoint) -> None:
    """Write an endpoint atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{endpoint.pid}")
    draft.write_bytes(msgspec.json.encode(endpoint))
    draft.replace(path)


def withdraw(path: Path) -> None:
    """Remove this process's endpoint, unless a successor has written its own meanwhile."""
    try:
        endpoint = msgspec.json.decode(path.read_bytes(), type=Endpoint)
    except (OSError, *UNREADABLE):
        return
    if endpoint.pid == os.getpid():
        path.unlink(missing_ok=True)


def _list(models: list[dict[str, str | int]]) -> dict[str, Any]:
    """All on one page, for clients of both APIs."""
    ends = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"object": "list", "data": models, "has_more": False, "first_id": ends[0], "last_id": ends[1]}


def _json(exchange: Exchange, status: int, value: Any) -> None:
    exchange.respond(status, [http1.JSON], msgspec.json.encode(value))
