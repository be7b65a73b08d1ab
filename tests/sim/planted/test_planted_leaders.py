"""Faults planted into leader election and scaling, one at a time: the rules find each within a few seeds."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from forebay.control.leading.term import Term
from forebay.control.snapshot import SnapshotFile
from forebay.gateway.scheduling import retrying
from forebay.providers.fencing import Fence
from forebay.sim.full.chaos import chaos
from forebay.sim.full.machine import MachineProvider
from forebay.sim.full.profile import draw

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

PROFILES = {seed: draw(Random(f"profile {seed}")) for seed in range(300)}
SEEDS = sorted(
    (seed for seed, found in PROFILES.items() if found.controls > 1 and "leader-stops-acting" in found.faults),
    key=lambda seed: (not PROFILES[seed].scaling, len(PROFILES[seed].faults)),
)
"""Those first in which there is much to do for who leads, and little else goes wrong."""
SCALED = sorted(
    (seed for seed, found in PROFILES.items() if found.scaling and found.calm),
    key=lambda seed: -PROFILES[seed].requests_per_s * PROFILES[seed].tokens_max * PROFILES[seed].step_ms,
)
"""Those first in which replicas have much under way; none has other faults than those of control."""
Plant = Callable[[pytest.MonkeyPatch], None]


def ignores_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """Who has led goes on as if nobody else did: neither lease nor fence nor the snapshot's epoch stops it."""

    async def keeps_on(term: Term, run: Any) -> None:
        return None

    patch.setattr(Term, "renew", keeps_on)
    patch.setattr(Term, "why_not", lambda term: "")
    patch.setattr(Fence, "check", lambda fence: None)
    patch.setattr(SnapshotFile, "_give_way", lambda snapshots: None)


def acts_behind_the_fence(patch: pytest.MonkeyPatch) -> None:
    """Whether it still leads, control asks its own clock before it decides, and nobody when it acts."""
    patch.setattr(Fence, "check", lambda fence: None)


def cuts_off_what_goes(patch: pytest.MonkeyPatch) -> None:
    """A replica that is one too many ends at once, and gateways do not go on elsewhere."""
    right = MachineProvider.remove

    async def at_once(provider: MachineProvider, slot: str, generation: int, grace_s: float) -> None:
        await right(provider, slot, generation, 0.0)

    patch.setattr(MachineProvider, "remove", at_once)
    patch.setattr(retrying, "may_go_on", lambda scheduler, relay: False)


PLANTED: dict[Plant, tuple[list[int], str]] = {
    ignores_the_epoch: (SEEDS, "a deposed leader changes nothing"),
    acts_behind_the_fence: (SEEDS, "a deposed leader changes nothing"),
    cuts_off_what_goes: (SCALED, "no request fails while only control fails"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_leader_fault_is_found_within_a_few_seeds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, rule = PLANTED[plant]
    for seed in seeds:
        with monkeypatch.context() as patch:
            plant(patch)
            verdict = chaos(seed)
        if any(rule in violation for violation in verdict.violations):
            return
    raise AssertionError(f"not found: {plant.__doc__}")
