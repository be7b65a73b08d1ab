"""Sends requests that their own model cannot serve to one that steps in for it, or refuses them."""

import re
from typing import TYPE_CHECKING, Final

from forebay.core.dispatch import Chosen
from forebay.core.errors import Refusal
from forebay.core.model import Condition
from forebay.core.routing import Route, may_wait
from forebay.core.tenancy import ANONYMOUS
from forebay.gateway.dispatch.dispatching import addressed, condition, read
from forebay.gateway.dispatch.endpoints import ENDPOINTS
from forebay.gateway.tensor import requests as tensor

TOKEN_IDS: Final = re.compile(rb"\s*\[[\s\[]*[0-9]")
"""How a prompt begins that is no text."""

if TYPE_CHECKING:
    from forebay.gateway.fleet import Served
    from forebay.gateway.gateway import Gateway
    from forebay.gateway.relay import Relay


def turn_away(
    gateway: "Gateway",
    relay: "Relay",
    problem: Refusal,
    retry_after_s: int,
    trouble: Condition = Condition.SATURATED,
) -> None:
    """Its model cannot serve it: let another one do so, or refuse it."""
    if not relay.served.ready:
        trouble = Condition.DOWN
    if not fall_back(gateway, relay, trouble):
        relay.refuse(problem, retry_after_s)


def fall_back(gateway: "Gateway", relay: "Relay", trouble: Condition) -> bool:
    """Send it to a model that steps in for its own, if there is one and its caller agrees."""
    before = relay.served
    if relay.exchange.started:
        return False
    chosen = relay.chosen or Chosen(before.routes.name, "")
    tenant = relay.admitted.tenant if relay.admitted is not None else ANONYMOUS
    exchange, band = relay.exchange, relay.ticket.band
    found = gateway.dispatcher.fall_back(chosen, exchange, gateway.served, trouble, tenant, band=band)
    if found is None:
        return False
    endpoint = ENDPOINTS.get(relay.path.encode()) or tensor.find(exchange)
    assert endpoint is not None
    try:
        endpoint, body = addressed(endpoint, exchange, relay.request.partition(b"\r\n\r\n")[2], found.model)
        request = read(endpoint, exchange, body)
    except Refusal:  # the replica will say so
        return False
    if not endpoint.runs or TOKEN_IDS.match(request.text):  # in another model's vocabulary they are other words
        return False
    if before.waiting.band(relay) is not None:
        relay.waited(gateway.now())
        before.waiting.leave(relay)
    before.account.fell_back(trouble).inc()
    relay.asked = relay.asked or chosen.model
    relay.chosen, relay.served = found, gateway.served[found.model]
    relay.tried, relay.ask, relay.charge, relay.session, relay.side = (), None, None, b"", None
    if relay.timer is not None:
        relay.timer.cancel()
        relay.timer = None
    gateway.aim(relay, request, body, endpoint)
    choice = gateway.place(relay)
    if isinstance(choice, Route):
        gateway.send(relay, choice)
    else:  # breakers may have changed their mind
        relay.served.waiting.enter_again(relay, relay.ticket, gateway.now())
    return True


def fall_back_all(gateway: "Gateway", served: "Served", now: float) -> None:
    """Let nobody wait where others can step in: not at all if no replica takes requests, else half of their time."""
    trouble = Condition.SATURATED if served.ready else Condition.DOWN
    others = [gateway.served[each.model] for each in served.routes.fallback if each.model in gateway.served]
    for relay in served.waiting.waiting():
        if not any(condition(other, relay.ticket.band) is Condition.FREE for other in others):
            return
        if trouble is Condition.DOWN or not may_wait(relay.began, relay.ticket.deadline, now):
            fall_back(gateway, relay, trouble)
