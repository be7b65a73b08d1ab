"""Requests that wait for the best replica although another one has room: the rules of `core.routing.late`."""

from typing import TYPE_CHECKING, Final

from forebay.core.routing import Route, Shed, Wait, may_wait

if TYPE_CHECKING:
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler

LOOK_MAX: Final = 64
"""Behind a held request, how many others are examined for some that do not wait for the same reason."""


def hold(scheduler: "Scheduler", relay: "Relay", choice: Wait) -> Route | Wait | Shed:
    """Let a request wait for the replica that `choice` names, if it may; else choose again without waiting."""
    served, routing, now = relay.served, relay.routing, scheduler.now()
    assert routing is not None
    waiting = served.waiting
    may_queue = len(waiting) < waiting.size_max or waiting.band(relay) is not None
    in_time = may_wait(relay.began, relay.ticket.last, now)
    if may_queue and in_time and not relay.exchange.started:
        link = served.links[choice.at]
        if link.awaited_at is None:
            link.awaited_at = now
        routing.held = True
        return choice
    routing.patient = False
    return scheduler.choose(relay)


def overtakes(relay: "Relay") -> bool:
    """Whether a new request would overtake a more urgent one that is held, and there is room in the queue."""
    waiting = relay.served.waiting
    first = next(iter(waiting))
    held = first.routing is not None and first.routing.held
    return held and first.ticket.band < relay.ticket.band and len(waiting) < waiting.size_max
