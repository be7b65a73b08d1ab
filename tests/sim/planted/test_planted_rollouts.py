"""Faults planted into rollouts, one at a time: the rules of a simulated cluster find each within a few seeds."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from forebay.control import deploying
from forebay.core.deploy import rollout as core
from forebay.core.deploy import splitting
from forebay.core.deploy.rollout import ModelObservation, Phase, Rollout
from forebay.core.deploy.slots import Held, with_stable
from forebay.core.model import Split
from forebay.gateway.rollout import arms
from forebay.gateway.scheduling import scheduler
from forebay.gateway.scheduling.choosing import choose_replica
from forebay.sim.full.chaos import chaos
from forebay.sim.full.profile import draw

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

PROFILES = {seed: draw(Random(f"profile {seed}")) for seed in range(150)}
SEEDS = sorted(
    (seed for seed, profile in PROFILES.items() if profile.rollouts),
    key=lambda seed: (not PROFILES[seed].calm, "replica-dies" in PROFILES[seed].faults),
)
"""Those first in which little else goes wrong."""
Plant = Callable[[pytest.MonkeyPatch], None]


def promotes_before_there_are_enough(patch: pytest.MonkeyPatch) -> None:
    """After the last step the old replicas go, however few there are of the new ones."""

    def wrong(rollout: Rollout, now: float) -> Rollout:
        return replace(rollout, phase=Phase.PROMOTED, since=now, share=1.0, forced=False)

    patch.setattr(core, "_take_over", wrong)


def makes_room_for_the_canary(patch: pytest.MonkeyPatch) -> None:
    """The canary's replicas come in place of old ones."""

    def wrong(held: Held, several: int) -> Held:
        return with_stable(held, max(1, several - len(held.canary)))

    patch.setattr("forebay.control.deploying.with_stable", wrong)


def counts_on_what_is_not_ready(patch: pytest.MonkeyPatch) -> None:
    """The canary has its share from the beginning, whether a replica of it is ready or not."""

    def wrong(rollout: Rollout, seen: ModelObservation, withdrawn: bool = False) -> Split:
        return replace(splitting.split_of(rollout, seen, withdrawn), share=0.5)

    patch.setattr("forebay.control.deploying.split_of", wrong)


def acts_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    """What was decided counts at once, whether it could be written down or not."""
    right = deploying.Deployments._advance

    def wrong(self: deploying.Deployments, row: Any, seen: Any, wall: float) -> None:
        right(self, row, seen, wall)
        following = self._following(row, seen, wall)
        self._ledger.rows[row.rollout.model] = replace(row, rollout=following.rollout)

    patch.setattr(deploying.Deployments, "_advance", wrong)


def forgets_who_asks(patch: pytest.MonkeyPatch) -> None:
    """Sides are drawn for each request, also where callers are to keep theirs."""
    patch.setattr(arms, "_caller", lambda relay: relay.request_id.decode())


def lets_the_canary_help_out(patch: pytest.MonkeyPatch) -> None:
    """Whatever has room gets what comes."""

    def wrong(own: Any, relay: Any, split: Any) -> Any:
        if relay.side is None or relay.side.rollout != split.rollout:
            relay.side = arms._side_for(relay, split)
        return choose_replica(own, relay, relay.tried)

    patch.setattr(scheduler, "choose_by_arm", wrong)


PLANTED: dict[Plant, str] = {
    promotes_before_there_are_enough: "never fewer ready replicas than before",
    makes_room_for_the_canary: "never fewer ready replicas than before",
    counts_on_what_is_not_ready: "no share exceeds what ready replicas carry",
    acts_before_it_is_stored: "no share is published before it is stored",
    forgets_who_asks: "a caller stays in one arm",
    lets_the_canary_help_out: "a canary gets no more than its share",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_rollout_fault_is_found_within_a_few_seeds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            plant(patch)
            verdict = chaos(seed)
        if any(PLANTED[plant] in violation for violation in verdict.violations):
            return
    raise AssertionError(f"not found: {plant.__doc__}")
