"""Stops attempts so that more urgent requests find a place; who gave way waits again, at the front of its band."""

from typing import TYPE_CHECKING, Final

from forebay.core.admission import Band, crowded, preempt
from forebay.core.resilience import Outcome
from forebay.core.routing import Route, Shed, Wait
from forebay.gateway.rollout.arms import bound_to
from forebay.wire.records import Attempt

if TYPE_CHECKING:
    from forebay.gateway.gateway import Gateway
    from forebay.gateway.relay import Relay

GAVE_WAY: Final = "gave_way"
"""Outcome of an attempt that was stopped for a more urgent request."""
PATIENCE_S: Final = 600.0
"""So long who gave way may wait for its next turn, if its client has named no deadline."""
NOTED_MAX: Final = 16
"""Attempts of one request that are written down at most before those that gave way are left out."""


def make_way(gateway: "Gateway", relay: "Relay", choice: Route | Wait | Shed) -> Route | Wait | Shed:
    """Let batch work step aside where an urgent request is to go. Returns where it goes in the end."""
    served = relay.served
    served.urgent_at = gateway.now()
    while isinstance(choice, Route):
        link = served.links[choice.at]
        stopped = 0
        while crowded(link.load, min(link.places, link.room), len(link.batch), link.batch_max, stopped):
            newest = next(reversed(link.batch))
            if newest.yields:
                give_way(gateway, newest)
                stopped += 1
            else:
                del link.batch[newest]
        if link.load < link.room:
            break
        choice = gateway.choose(relay)  # one was in the way that cannot step aside
    return choice


def make_room(gateway: "Gateway", relay: "Relay") -> None:
    """No replica has room for it: let an attempt of a lower band that nothing was seen of yet give way."""
    served, band = relay.served, relay.ticket.band
    if not any(served.running[band + 1 : Band.BATCH]):  # batch work is not in its way: it would have made way
        return
    revision = bound_to(relay)
    links = (x for x in served.links if x.live and x.load <= x.room and revision in ("", x.revision))
    victim = preempt((each for link in links for each in link.attempts), band)
    if victim is not None:
        give_way(gateway, victim)
        gateway.pump(served)


def give_way(gateway: "Gateway", victim: "Relay") -> None:
    """Stop its attempt; it waits again."""
    served, link, ticket, now = victim.served, victim.link, victim.ticket, gateway.now()
    assert link is not None
    served.account.preempted(ticket.band.name.lower()).inc()
    if victim.hedge is not None:
        gateway.hedged(victim, won=False)
    if len(victim.attempts) < NOTED_MAX:
        victim.attempts += (Attempt(link.id, victim.why, GAVE_WAY, now - victim.since),)
    victim.wait_on(now + PATIENCE_S)
    victim.give_way()
    gateway.take_back(victim, Outcome.NEUTRAL, now)
    served.waiting.enter_again(victim, victim.ticket, now, since=victim.began)
