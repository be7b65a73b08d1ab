"""Preempts attempts for more urgent requests; a preempted request is queued again, at the front of its band."""

from typing import TYPE_CHECKING, Final

from forebay.core.admission import Band, crowded, preempt
from forebay.core.resilience import Outcome
from forebay.core.routing import Route, Shed, Wait
from forebay.gateway.rollout.arms import bound_to
from forebay.wire.records import Attempt

if TYPE_CHECKING:
    from forebay.gateway.link import Link
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler

GAVE_WAY: Final = "gave_way"
"""Outcome of a preempted attempt."""
PATIENCE_S: Final = 600.0
"""How long a preempted request may wait for its next attempt, if its client set no deadline."""
NOTED_MAX: Final = 16
"""Preempted attempts are recorded only up to this many attempts of one request."""


def preempt_batch(scheduler: "Scheduler", relay: "Relay", choice: Route | Wait | Shed) -> Route | Wait | Shed:
    """Preempt batch work at the chosen replica for an urgent request. Returns the final choice."""
    served = relay.served
    served.urgent_at = scheduler.now()
    while isinstance(choice, Route):
        link = served.links[choice.at]
        places, stopped = min(link.places, link.room), 0
        if crowded(link.load, places, len(link.batch), link.batch_max):
            for attempt in [each for each in link.batch if not each.yields]:
                del link.batch[attempt]
        while (
            crowded(link.load, places, len(link.batch), link.batch_max, stopped)
            and link.load - len(link.batch) < link.room  # otherwise preempting all of it makes no room
        ):
            preempt_attempt(scheduler, next(reversed(link.batch)))
            stopped += 1
        if link.load < link.room:
            break
        choice = scheduler.choose(relay)  # an attempt there could not be preempted
    return choice


def preempt_queued(scheduler: "Scheduler", relay: "Relay", link: "Link") -> None:
    """Preempt those of lower bands that the chosen replica only queues: the newest, as engines run them in order."""
    queued = link.load - link.places
    if queued <= 0 or not any(relay.served.running[relay.ticket.band + 1 : Band.BATCH]):
        return
    for attempt in list(reversed(link.attempts))[:queued]:
        if attempt.band > relay.ticket.band and attempt.yields:
            preempt_attempt(scheduler, attempt)


def preempt_lower(scheduler: "Scheduler", relay: "Relay", choice: Wait) -> None:
    """No replica has room, or that of its session: preempt an attempt there of a lower band that has sent nothing to
    its client yet."""
    served, band = relay.served, relay.ticket.band
    if not any(served.running[band + 1 : Band.BATCH]):  # batch work would have been preempted already
        return
    revision = bound_to(relay)
    there = served.links if choice.at < 0 else [served.links[choice.at]]
    links = (link for link in there if link.live and link.load <= link.room)
    usable = (link for link in links if revision in ("", link.revision))
    victim = preempt((attempt for link in usable for attempt in link.attempts), band)
    if victim is not None:
        preempt_attempt(scheduler, victim)
        scheduler.pump(served)


def preempt_attempt(scheduler: "Scheduler", victim: "Relay") -> None:
    """Preempt an attempt; its request is queued again."""
    served, link, ticket, now = victim.served, victim.link, victim.ticket, scheduler.now()
    assert link is not None
    served.account.preempted(ticket.band.name.lower()).inc()
    if victim.hedge is not None:
        scheduler.end_hedge(victim, won=False)
    if len(victim.attempts) < NOTED_MAX:
        victim.attempts += (Attempt(link.id, victim.why, GAVE_WAY, now - victim.since),)
    victim.extend_wait(now + PATIENCE_S)
    victim.preempt()
    scheduler.end_attempt(victim, Outcome.NEUTRAL, now)
    served.waiting.enter_again(victim, victim.ticket, now, since=victim.began)
