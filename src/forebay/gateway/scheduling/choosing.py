"""Choose a replica among the eligible ones: breakers, preemptible batch work, then the policy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from forebay.core.resilience import admissible
from forebay.core.routing import ReplicaView, Route, Shed, Wait
from forebay.gateway.dispatch.dispatching import of_other_revisions
from forebay.gateway.link import BATCH, BandView
from forebay.gateway.scheduling.hedging import Hedge

if TYPE_CHECKING:
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler

TOKENIZING_MAX: Final = 32
"""So many requests that need only the tokenizer may be at a replica beyond its room: each takes a millisecond."""


def among(
    scheduler: "Scheduler", relay: "Relay", tried: tuple[tuple[str, int], ...], sound: bool = False
) -> Route | Wait | Shed:
    """Choose among the replicas that are not in `tried`; with `sound` never one whose breaker is open."""
    served, band, chooser, rng = relay.served, relay.ticket.band, scheduler.chooser, scheduler.rng
    if relay.revision:
        tried = (*tried, *of_other_revisions(served.links, relay.revision))
    policy, routing, pricing = served.routes.policy, relay.routing, served.pricing
    links: Sequence[ReplicaView] = served.links
    taken: list[tuple[str, int]] = []
    if relay.slotless:
        links = [BandView(link, link.load, link.room + TOKENIZING_MAX) for link in served.links]
    elif band == BATCH or (served.running[BATCH] and not isinstance(relay, Hedge)):
        links = served.seen_by(band, scheduler.now())
        if band < BATCH and not (routing is not None and routing.stays):
            taken = served.full_for_urgent()
    if served.troubled:
        live = [link for link in served.links if link.live]
        allowed = admissible([link.breaker for link in live], scheduler.now())
        shut = [(link.id, link.generation) for at, link in enumerate(live) if at not in allowed]
        if shut:
            choice = chooser(policy, links, (*tried, *shut, *taken), rng, request=routing, pricing=pricing)
            if taken and not isinstance(choice, Route):
                choice = chooser(policy, links, (*tried, *shut), rng, request=routing, pricing=pricing)
            if sound or not isinstance(choice, Shed):
                return choice
    if taken:
        choice = chooser(policy, links, (*tried, *taken), rng, request=routing, pricing=pricing)
        if isinstance(choice, Route):
            return choice
    return chooser(policy, links, tried, rng, request=routing, pricing=pricing)
