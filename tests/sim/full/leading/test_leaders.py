"""Several controllers and a changing number of replicas: clients do not notice failures of leaders."""

import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from forebay.core.model import Policy
from forebay.core.scaling.settings import Policy as Scaling
from forebay.sim.full.chaos import Verdict, chaos
from forebay.sim.full.leading.faults import FAULTS
from forebay.sim.full.profile import Profile, draw

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

DIGEST = "from forebay.sim.full.chaos import chaos; print(chaos({seed}).digest)"
PROFILES = {seed: draw(Random(f"profile {seed}")) for seed in range(300)}
CALM = replace(
    draw(Random("profile 0"), faults=False),
    policy=Policy.CPR.value, gateways=2, replicas=2, concurrency=4, step_ms=20.0, tokens_max=20, leaving=0.0,
    slow=0.0, requests_per_s=6.0, queue_max=100, queue_timeout_s=20.0, chaos_s=18.0, fault_every_s=3.0, calm=True,
)  # fmt: skip


def leaders(verdict: Verdict) -> int:
    """How many terms there were."""
    return verdict.counts["leads"]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_leading_controls_do_not_affect_clients(fault: str) -> None:
    verdict = chaos(1, profile=replace(CALM, controls=3, faults=(fault,)), tail_max=100_000)

    assert verdict.ok, "\n".join(verdict.violations)
    assert verdict.endings.keys() <= {"complete", "left"}
    assert verdict.endings["complete"] > 50
    terms = leaders(verdict)
    if fault in ("leader-dies", "leader-stops", "leader-loses-store"):
        assert terms > 2
    elif fault == "follower-dies":
        assert terms == 1
    if fault == "leader-stops":
        assert any(" deposed " in line for line in verdict.tail), "one that was stopped finds out and waits again"


@pytest.mark.parametrize("scaling", Scaling)
def test_no_accepted_request_is_lost_when_replicas_are_removed(scaling: Scaling) -> None:
    profile = replace(CALM, scaling=scaling.value, faults=("control-dies",), fault_every_s=6.0)
    verdict = chaos(2, profile=profile, tail_max=100_000)

    assert verdict.ok, "\n".join(verdict.violations)
    assert verdict.endings.keys() <= {"complete", "left"}
    assert sum(" ask chat-" in line for line in verdict.tail) > 2, "replicas have gone"


def kinds(choose: str) -> list[Profile]:
    return [profile for profile in PROFILES.values() if getattr(profile, choose) not in (1, "")]


def test_seeds_draw_several_controls_with_scaling_and_never_with_rollouts() -> None:
    several, scaled = kinds("controls"), kinds("scaling")

    assert 30 < len(several) < 90
    assert 30 < len(scaled) < 90
    assert any(profile in scaled for profile in several)
    assert not any(profile.rollouts for profile in (*several, *scaled))
    assert {name for profile in several for name in profile.faults} >= {*FAULTS}
    assert {profile.scaling for profile in scaled} == {policy.value for policy in Scaling}


def test_seed_with_several_controls_is_reproducible_across_processes() -> None:
    wanted = {"leader-stops", "leader-loses-store"}
    seeds = [seed for seed, found in PROFILES.items() if found.scaling and wanted <= {*found.faults}]
    seed = min(seeds, key=lambda each: PROFILES[each].chaos_s * PROFILES[each].requests_per_s)
    call = (sys.executable, "-c", DIGEST.format(seed=seed))
    digests = {
        subprocess.run(
            call, env={**os.environ, "PYTHONHASHSEED": str(number)}, check=True, capture_output=True, text=True
        ).stdout.strip()
        for number in range(2)
    }
    assert digests == {chaos(seed).digest}
