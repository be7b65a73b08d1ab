"""Choose a replica among the eligible ones: breakers, preemptible batch work, then the policy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from forebay.core.resilience import admissible
from forebay.core.routing import ReplicaView, Route, Shed, Wait, Why
from forebay.gateway.dispatch.dispatching import meant_revisions, of_other_revisions
from forebay.gateway.fleet import Served
from forebay.gateway.link import BATCH, BandView
from forebay.gateway.scheduling.hedging import Hedge

if TYPE_CHECKING:
    from forebay.gateway.requests.relay import Relay
    from forebay.gateway.scheduling.scheduler import Scheduler

TOKENIZING_MAX: Final = 32
"""How many requests that need only the tokenizer a full replica still gets: each takes a millisecond."""


def choose_replica(
    scheduler: "Scheduler", relay: "Relay", tried: tuple[tuple[str, int], ...], *, admissible_only: bool = False
) -> Route | Wait | Shed:
    """Choose among the replicas that are not in `tried`.

    Those that their breakers exclude are used only if all others were tried, or by sequences that have begun; with
    `admissible_only`, only by these, and never by hedges. Those where an urgent request would queue even after
    preempting batch work are used only if there is no other.
    """
    served, band, chooser, rng = relay.served, relay.ticket.band, scheduler.chooser, scheduler.rng
    if relay.revision:
        tried = (*tried, *of_other_revisions(served.links, relay.revision))
        if _is_absent(served, relay.revision):
            return Wait(Why.NONE_READY)
    policy, routing, pricing = served.routes.policy, relay.routing, served.pricing
    links: Sequence[ReplicaView] = served.links
    crowded: list[tuple[str, int]] = []
    if relay.slotless:
        links = [BandView(link, link.load, link.room + TOKENIZING_MAX) for link in served.links]
    elif band == BATCH or (served.running[BATCH] and not isinstance(relay, Hedge)):
        links = served.seen_by(band, scheduler.now())
        if band < BATCH and not (routing is not None and routing.stays):
            crowded = served.full_for_urgent()
    if served.troubled and not relay.mid_sequence:
        live = [link for link in served.links if link.live]
        allowed = admissible([link.breaker for link in live], scheduler.now())
        excluded = [(link.id, link.generation) for at, link in enumerate(live) if at not in allowed]
        if excluded:
            choice = chooser(policy, links, (*tried, *excluded, *crowded), rng, request=routing, pricing=pricing)
            if crowded and not isinstance(choice, Route):
                choice = chooser(policy, links, (*tried, *excluded), rng, request=routing, pricing=pricing)
            if admissible_only or isinstance(relay, Hedge) or not isinstance(choice, Shed):
                return choice
    if crowded:
        choice = chooser(policy, links, (*tried, *crowded), rng, request=routing, pricing=pricing)
        if isinstance(choice, Route):
            return choice
    return chooser(policy, links, tried, rng, request=routing, pricing=pricing)


def _is_absent(served: Served, revision: str) -> bool:
    """Whether a revision that control serves has no replica now: one is being started."""
    return revision in meant_revisions(served) and all(link.revision != revision for link in served.links)
