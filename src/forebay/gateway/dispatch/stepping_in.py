"""Sends requests that their own model cannot serve to one that steps in for it, or refuses them."""

import re
from typing import TYPE_CHECKING, Final

from forebay.core.dispatch import Chosen
from forebay.core.errors import Code, Refusal
from forebay.core.model import Condition
from forebay.core.resilience import Outcome
from forebay.core.routing import Route, may_wait
from forebay.core.tenancy import ANONYMOUS
from forebay.gateway.dispatch.dispatching import addressed, condition, read
from forebay.gateway.dispatch.endpoints import ENDPOINTS, Endpoint
from forebay.gateway.tensor import requests as tensor
from forebay.wire.apis.wanted import Wanted
from forebay.wire.records import Attempt

TOKEN_IDS: Final = re.compile(rb"\s*\[[\s\[]*[0-9]")
"""How a prompt begins that is no text."""
UNABLE: Final = frozenset({Code.CONTEXT_LENGTH_EXCEEDED.value, Code.UNSUPPORTED_PARAMETER.value})
"""What a model refuses for what it is itself: another one may well serve it."""

Made = tuple[Endpoint, bytes, Wanted]
"""A request as one for another model."""

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
    if relay.chosen is None or not relay.chosen.before:
        relay.instead = (problem, retry_after_s)
    if not fall_back(gateway, relay, trouble):
        relay.refuse(problem, retry_after_s)


def fall_back(gateway: "Gateway", relay: "Relay", trouble: Condition) -> bool:
    """Send it to a model that steps in for its own, if there is one and its caller agrees."""
    before = relay.served
    if relay.exchange.started:
        return False
    chosen = relay.chosen or Chosen(before.routes.name, "")
    tenant = relay.admitted.tenant if relay.admitted is not None else ANONYMOUS
    found = gateway.dispatcher.fall_back(
        chosen, relay.exchange, gateway.served, trouble, tenant, band=relay.ticket.band
    )
    if found is None:
        return False
    made = _made_for(relay, found.model)
    if made is None:
        return False
    endpoint, _, request = made
    if not endpoint.runs or TOKEN_IDS.match(request.text):  # in another model's vocabulary they are other words
        return False
    if before.waiting.band(relay) is not None:
        relay.waited(gateway.now())
        before.waiting.leave(relay)
    before.account.fell_back(trouble).inc()
    relay.asked = relay.asked or chosen.model
    _hand_over(gateway, relay, found, made)
    return True


def step_back(gateway: "Gateway", relay: "Relay", code: str) -> bool:
    """Take it back from a model that stepped in and refuses what its own may well serve. False: that is no reason.

    The next one steps in. Where there is none it waits for its own model again, or is told what was wrong with that.
    """
    chosen, link = relay.chosen, relay.link
    if chosen is None or not chosen.before or code not in UNABLE or link is None:
        return False
    now = gateway.now()
    relay.attempts += (Attempt(link.id, relay.why, code, now - relay.since),)
    gateway.take_back(relay, Outcome.NEUTRAL, now)
    if fall_back(gateway, relay, chosen.trouble):
        return True
    meant = chosen.before[0]
    own, made = gateway.served.get(meant), _made_for(relay, meant)
    if own is None or made is None:
        relay.refuse(Refusal(Code.NO_REPLICA), 1)
    elif relay.instead is not None:
        relay.served, relay.chosen = own, Chosen(meant, "")
        relay.refuse(*relay.instead)
    else:
        before = (*chosen.before, chosen.model)
        _hand_over(gateway, relay, Chosen(meant, f"{chosen.model} refuses it", "", before, chosen.trouble), made)
    return True


def _made_for(relay: "Relay", model: str) -> Made | None:
    """It as a request for another model; None if it cannot be one, as the replica will say."""
    exchange = relay.exchange
    endpoint = ENDPOINTS.get(relay.path.encode()) or tensor.find(exchange)
    assert endpoint is not None
    try:
        endpoint, body = addressed(endpoint, exchange, relay.request.partition(b"\r\n\r\n")[2], model)
        return endpoint, body, read(endpoint, exchange, body)
    except Refusal:
        return None


def _hand_over(gateway: "Gateway", relay: "Relay", found: Chosen, made: Made) -> None:
    """Let another model have it, at once or when there is room."""
    endpoint, body, request = made
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


def fall_back_all(gateway: "Gateway", served: "Served", now: float) -> None:
    """Let nobody wait where others can step in: not at all if no replica takes requests, else half of their time."""
    trouble = Condition.SATURATED if served.ready else Condition.DOWN
    others = [gateway.served[each.model] for each in served.routes.fallback if each.model in gateway.served]
    for relay in served.waiting.waiting():
        if not any(condition(other, relay.ticket.band) is Condition.FREE for other in others):
            return
        if trouble is Condition.DOWN or not may_wait(relay.began, relay.ticket.deadline, now):
            fall_back(gateway, relay, trouble)
