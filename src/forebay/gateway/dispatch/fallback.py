"""Send requests that their own model cannot serve to a fallback model, or reject them."""

import re
from typing import TYPE_CHECKING, Final

from forebay.core.admission import Band
from forebay.core.dispatch import Chosen
from forebay.core.errors import Code, Refusal
from forebay.core.model import Condition
from forebay.core.routing import Route, may_wait
from forebay.core.tenancy import ANONYMOUS
from forebay.gateway.asking import BATCH_PATIENCE, prepare
from forebay.gateway.dispatch.dispatching import addressed, condition, read
from forebay.gateway.dispatch.endpoints import ENDPOINTS, Endpoint
from forebay.gateway.tensor import requests as tensor
from forebay.wire.apis.request_fields import RequestFields

TOKEN_IDS: Final = re.compile(rb"\s*\[[\s\[]*[0-9]")
"""Start of a prompt given as token ids."""
UNABLE: Final = frozenset({Code.CONTEXT_LENGTH_EXCEEDED.value, Code.UNSUPPORTED_PARAMETER.value})
"""Errors that depend on the model: another one may well serve the request."""

Made = tuple[Endpoint, bytes, RequestFields]
"""A request rewritten for another model."""

if TYPE_CHECKING:
    from forebay.gateway.fleet import Served
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler


def fall_back_or_reject(
    scheduler: "Scheduler",
    relay: "Relay",
    problem: Refusal,
    retry_after_s: int,
    trouble: Condition = Condition.SATURATED,
) -> None:
    """Its model cannot serve it: use a fallback model, or reject it."""
    if not relay.served.ready:
        trouble = Condition.DOWN
    if relay.chosen is None or not relay.chosen.before:
        relay.instead = (problem, retry_after_s)
    if not fall_back(scheduler, relay, trouble):
        relay.refuse(problem, retry_after_s)


def fall_back(scheduler: "Scheduler", relay: "Relay", trouble: Condition, code: str = "") -> bool:
    """Send it to a fallback model, if there is one and the caller allows it. `code`: the error of the last one."""
    before = relay.served
    if relay.exchange.started or relay.once or relay.bound:  # another model has no state of a sequence
        return False
    chosen = relay.chosen or Chosen(before.routes.name, "")
    tenant = relay.admitted.tenant if relay.admitted is not None else ANONYMOUS
    found = scheduler.dispatcher.fall_back(
        chosen, relay.exchange, scheduler.served, trouble, tenant, band=relay.ticket.band
    )
    if found is None:
        return False
    made = _made_for(relay, found.model)
    # token ids mean other text in another model's vocabulary
    if made is None or not made[0].runs or TOKEN_IDS.match(made[2].text):
        relay.bound = True  # a queue is gone through several times a second, and reading it took time
        return False
    now = scheduler.now()
    if now > (relay.free_at or relay.began):  # in the queue, which it may have left already
        relay.waited(now)
    before.waiting.leave(relay)
    before.account.fell_back(code or trouble).inc()
    relay.asked = relay.asked or chosen.model
    _hand_over(scheduler, relay, found, made)
    return True


def step_back(scheduler: "Scheduler", relay: "Relay", code: str) -> bool:
    """Take it back from a fallback model whose error its own model would not give. False: the error is no such one.

    The next fallback is tried. Without one it is queued for its own model again; if that had rejected it already, it
    gets that error, unless a replica has become free meanwhile.
    """
    chosen = relay.chosen
    if chosen is None or not chosen.before or code not in UNABLE:
        return False
    if chosen.model == chosen.before[0]:  # its own model, after a fallback model refused it: so this is the answer
        return False
    now, freed = scheduler.now(), relay.served
    scheduler.attempt_rejected(relay, code, now)
    if not fall_back(scheduler, relay, chosen.trouble, code):
        _hand_back(scheduler, relay, chosen, code)
    if freed.waiting:
        scheduler.pump(freed)
    return True


def _hand_back(scheduler: "Scheduler", relay: "Relay", chosen: Chosen, code: str) -> None:
    """Pass it from a fallback model, the last one, to its own model."""
    meant = chosen.before[0]
    made = _made_for(relay, meant)
    if meant not in scheduler.served or made is None:
        relay.refuse(Refusal(Code.NO_REPLICA), 1)
    else:
        relay.served.account.fell_back(code).inc()
        before = (*chosen.before, chosen.model)
        _hand_over(scheduler, relay, Chosen(meant, f"{chosen.model} refuses it", "", before, chosen.trouble), made)


def _made_for(relay: "Relay", model: str) -> Made | None:
    """The request rewritten for another model; None if that is impossible, as the replica will report."""
    exchange = relay.exchange
    endpoint = ENDPOINTS.get(relay.path.encode()) or tensor.find(exchange)
    assert endpoint is not None
    try:
        endpoint, body = addressed(endpoint, exchange, relay.request.partition(b"\r\n\r\n")[2], model)
        return endpoint, body, read(endpoint, exchange, body)
    except Refusal:
        return None


def _hand_over(scheduler: "Scheduler", relay: "Relay", found: Chosen, made: Made) -> None:
    """Pass it to another model, at once or when there is room."""
    endpoint, body, request = made
    now = scheduler.now()
    relay.served.stay_s += now - relay.arrived
    relay.chosen, relay.served, relay.joined = found, scheduler.served[found.model], now
    relay.routing, relay.charge, relay.session, relay.side = None, None, b"", None
    if relay.timer is not None:
        relay.timer.cancel()
        relay.timer = None
    prepare(relay, request, body, endpoint)
    choice = scheduler.place(relay)
    if isinstance(choice, Route):
        scheduler.send(relay, choice)
    elif relay.instead is not None and found.model == found.before[0]:
        relay.refuse(*relay.instead)
    else:  # breakers may have changed state
        relay.served.waiting.enter_again(relay, relay.ticket, now)


def fall_back_all(scheduler: "Scheduler", served: "Served", now: float) -> None:
    """Let no request wait if a fallback is free: at once if no replica accepts requests, else after half its time."""
    trouble = Condition.SATURATED if served.ready else Condition.DOWN
    others = [scheduler.served[each.model] for each in served.routes.fallback if each.model in scheduler.served]
    free: dict[Band, bool] = {}  # until one of them gets a request: thousands may wait, with nobody else to be served
    for relay in served.waiting.waiting():
        band = relay.band
        patience_s = served.routes.queue_timeout_s * (BATCH_PATIENCE if band is Band.BATCH else 1)
        deadline = min(relay.ticket.deadline, relay.began + patience_s)  # preemption extends the former
        if trouble is not Condition.DOWN and may_wait(relay.began, deadline, now):
            continue
        if band not in free:
            free[band] = any(condition(other, band) is Condition.FREE for other in others)
        if not free[band]:
            return
        if fall_back(scheduler, relay, trouble):
            free.clear()
