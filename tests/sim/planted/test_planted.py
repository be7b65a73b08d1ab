"""Faults planted into the product, one at a time: the rules of a simulated cluster find each within a few seeds."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from forebay.control import loop
from forebay.core.admission import RequestQueue, Ticket
from forebay.core.errors import CLIENT_CLOSED, Refusal
from forebay.core.model import LoadReport, ModelRoutes, ReplicaState
from forebay.core.reconcile import ClusterObservation
from forebay.core.resilience import Breaker, Outcome, State
from forebay.core.routing import Route, Shed, Wait, Why, choose, effective_state
from forebay.gateway import link as link_module
from forebay.gateway import polling
from forebay.gateway.fleet import Served
from forebay.gateway.link import Link
from forebay.gateway.requests.relay import Relay
from forebay.gateway.scheduling import scheduler
from forebay.gateway.scheduling.scheduler import Scheduler
from forebay.net.client import CallError
from forebay.sim.full.chaos import chaos
from forebay.wire.transcript import Transcript

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

SEEDS = range(40)
Plant = Callable[[pytest.MonkeyPatch], None]


def settles_twice(patch: pytest.MonkeyPatch) -> None:
    """A request that ends is accounted for two times."""
    right = Relay._end

    def wrong(relay: Relay, code: str, status: int) -> None:
        over = relay._over
        right(relay, code, status)
        if not over:
            relay.scheduler.end_request(relay, code, status, relay.scheduler.now())

    patch.setattr(Relay, "_end", wrong)


def begins_again(patch: pytest.MonkeyPatch) -> None:
    """A stream that breaks off is asked for from its beginning."""
    patch.setattr(Relay, "_continuation", lambda relay: relay.request)


def repeats_at_the_seam(patch: pytest.MonkeyPatch) -> None:
    """The replica that goes on is not told the last characters that the client has."""
    right = Transcript.state

    def wrong(transcript: Transcript) -> Any:
        said = right(transcript)
        return said._replace(text=said.text[:-3]) if said is not None and len(said.text) > 3 else said

    patch.setattr(Transcript, "state", wrong)


def cancels_nothing(patch: pytest.MonkeyPatch) -> None:
    """When a client leaves, the replica is not told."""
    patch.setattr(Relay, "client_gone", lambda relay: relay._end(CLIENT_CLOSED, 499))


def herds(patch: pytest.MonkeyPatch) -> None:
    """Once a replica was removed, everything goes to the first one."""
    removed: list[Link] = []
    right = Served.unlink

    def unlink(served: Served, link: Link) -> None:
        removed.append(link)
        right(served, link)

    def wrong(policy: Any, replicas: Any, tried: Any, rng: Any, **more: Any) -> Route | Wait | Shed:
        choice = choose(policy, replicas, tried, rng, **more)
        first = next((at for at, each in enumerate(replicas) if each.load < each.room), None)
        if not removed or not isinstance(choice, Route) or first is None:
            return choice
        here = replicas[first]
        usable = here.state is ReplicaState.READY and (here.id, here.generation) not in tried
        return Route(first, Why.FEWEST) if usable else choice

    patch.setattr(Served, "unlink", unlink)
    patch.setattr(scheduler, "choose", wrong)


def queues_without_limit(patch: pytest.MonkeyPatch) -> None:
    """Everybody may wait."""

    def wrong(room: RequestQueue[Any], item: Any, ticket: Ticket, now: float) -> None:
        room._add(item, ticket, False, now, now)

    patch.setattr(RequestQueue, "enter", wrong)


def routes_to_old_generations(patch: pytest.MonkeyPatch) -> None:
    """Whoever is at the address of a replica is taken for it."""
    right, relink = Link.apply_report, polling.Fleet._relink
    first: dict[tuple[polling.Fleet, str], int] = {}

    def apply_report(link: Link, report: LoadReport, own: int) -> str:
        return right(link, replace(report, replica=link.id, generation=link.generation), own)

    def wrong(self: polling.Fleet, served: Served, routes: ModelRoutes) -> None:
        kept = tuple(replace(x, generation=first.setdefault((self, x.id), x.generation)) for x in routes.replicas)
        relink(self, served, replace(routes, replicas=kept))

    patch.setattr(Link, "apply_report", apply_report)
    patch.setattr(polling.Fleet, "_relink", wrong)


def ignores_draining(patch: pytest.MonkeyPatch) -> None:
    """A replica that drains gets requests all the same."""
    right = effective_state

    def wrong(planned: ReplicaState, reported: ReplicaState) -> ReplicaState:
        state = right(planned, reported)
        return ReplicaState.READY if state is ReplicaState.DRAINING else state

    patch.setattr(link_module, "effective_state", wrong)


def forgets_probes(patch: pytest.MonkeyPatch) -> None:
    """A breaker on trial never closes: its probes are not given back."""
    right = Breaker.end

    def wrong(breaker: Breaker, mark: int, outcome: Outcome, now: float) -> None:
        if breaker.state is not State.HALF_OPEN:
            right(breaker, mark, outcome, now)

    patch.setattr(Breaker, "end", wrong)


def believes_the_old_snapshot(patch: pytest.MonkeyPatch) -> None:
    """Of the snapshots that a gateway reads, some are thrown away for the one that it knows."""
    right, count = polling.Fleet._apply, [0]

    def wrong(self: polling.Fleet, snapshot: Any) -> None:
        count[0] += 1
        known = self._gateway.snapshot
        right(self, known if known is not None and not count[0] % 9 else snapshot)

    patch.setattr(polling.Fleet, "_apply", wrong)


def keeps_what_was_lost(patch: pytest.MonkeyPatch) -> None:
    """An attempt whose connection is reset stays in the accounts."""
    right = Relay.on_error

    def wrong(relay: Relay, error: CallError) -> None:
        link = relay.link
        right(relay, error)
        if error.kind == "lost" and link is not None and relay not in link.attempts:
            link.attempts[relay] = None

    patch.setattr(Relay, "on_error", wrong)


def says_nothing(patch: pytest.MonkeyPatch) -> None:
    """A request whose replica is lost is forgotten."""
    right = Scheduler.attempt_failed

    def wrong(self: Scheduler, relay: Relay, reason: str, problem: Refusal) -> None:
        if reason == "lost":
            self.end_attempt(relay, Outcome.NEUTRAL, self.now())
        else:
            right(self, relay, reason, problem)

    patch.setattr(Scheduler, "attempt_failed", wrong)


def acts_on_the_unknown(patch: pytest.MonkeyPatch) -> None:
    """Units that nobody can see are taken for units that are not there."""
    right = loop.Controller._observe

    async def wrong(self: loop.Controller) -> ClusterObservation:
        seen = await right(self)
        return seen if seen.units is not None else ClusterObservation(())

    patch.setattr(loop.Controller, "_observe", wrong)


def passes_garbage_on(patch: pytest.MonkeyPatch) -> None:
    """A whole answer that is none is passed on."""
    patch.setattr("forebay.gateway.requests.relay.OBJECT_ENDS", (b"",))


PLANTED: dict[Plant, Iterable[str]] = {
    settles_twice: ("every request ends once",),
    begins_again: ("after the first byte a request is only resumed",),
    repeats_at_the_seam: ("a complete response has the expected text", "no text is lost or repeated"),
    cancels_nothing: ("no worker works on a cancelled request",),
    herds: ("no request queues at a replica while another is free",),
    queues_without_limit: ("every queue stays within its limit",),
    routes_to_old_generations: ("no request is sent to an old generation",),
    ignores_draining: (
        "no request is sent to a draining replica",
        "no request is sent to a replica that control drains",
    ),
    forgets_probes: ("breaker probes are counted",),
    believes_the_old_snapshot: ("gateways use the published snapshot",),
    keeps_what_was_lost: ("every attempt belongs to an open request", "running requests are counted by band"),
    says_nothing: ("every request is answered",),
    acts_on_the_unknown: ("no action while the units are unknown",),
    passes_garbage_on: ("responses are valid HTTP", "no unexpected exception"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_fault_is_found_within_a_few_seeds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            plant(patch)
            verdict = chaos(seed)
        if any(rule in violation for rule in PLANTED[plant] for violation in verdict.violations):
            return
    raise AssertionError(f"not found: {plant.__doc__}")
