"""Rollouts in whole clusters: bad revisions are detected by their requests alone, good ones are promoted."""

import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from forebay.core.deploy.course import Course, Kind
from forebay.core.rollout import Step
from forebay.sim.full.chaos import Verdict, chaos
from forebay.sim.full.profile import Profile, draw
from forebay.sim.full.rollouts import operator

pytestmark = [pytest.mark.interpreted, pytest.mark.slow]

LONG = Course(Kind.CANARY, (Step(0.5, 60.0),), start_timeout_s=8.0, warm_up_s=1.0, settle_s=1.0)
FIRST = 100
"""The first of the seeds that other tests leave alone."""
DIGEST = "from forebay.sim.full.chaos import chaos; print(chaos({seed}).digest)"


def has_rollouts(seed: int) -> Profile | None:
    profile = draw(Random(f"profile {seed}"))
    return profile if profile.rollouts else None


def ended(verdict: Verdict) -> list[str]:
    return [line.split(": ", 1)[1] for line in verdict.tail if " of what is " in line]


def undisturbed(nature: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """A canary with half of a good deal of traffic, for so long; only then somebody decides what is open."""
    monkeypatch.setattr(operator, "draw_course", lambda kind, rng: LONG)
    monkeypatch.setattr(operator, "PATIENCE_S", (seconds, seconds))
    monkeypatch.setattr(operator, "WHIM", 0.0)
    profile = replace(
        draw(Random(f"profile {FIRST}"), faults=False),
        policy="least_requests", gateways=2, replicas=4, concurrency=5, step_ms=20.0, tokens_max=20, leaving=0.0,
        requests_per_s=20.0, queue_max=100, queue_timeout_s=20.0, chaos_s=seconds, rollouts=(f"canary/{nature}",),
        calm=True,
    )  # fmt: skip
    return chaos(1, profile=profile, tail_max=100_000)


@pytest.mark.parametrize(
    ("nature", "seconds", "reason"),
    [
        ("failing", 30.0, "errors"),
        ("slow", 50.0, "latency"),
        ("dying", 10.0, "crash"),
        ("broken", 10.0, "crash"),
        ("stuck", 15.0, "were ready after 8 s"),
    ],
)
def test_a_bad_canary_is_rolled_back_without_failed_requests(
    nature: str, seconds: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = undisturbed(nature, seconds, monkeypatch)
    assert verdict.ok, "\n".join(verdict.violations)
    [end] = ended(verdict)
    assert end.startswith("rolled_back")
    assert reason in end


def test_good_canary_is_never_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = undisturbed("sound", 30.0, monkeypatch)
    assert verdict.ok, "\n".join(verdict.violations)
    [end] = ended(verdict)
    assert end.startswith("promoted")


def test_a_third_of_the_seeds_draw_rollouts_and_half_of_these_without_faults() -> None:
    profiles = [profile for seed in range(1000) if (profile := has_rollouts(seed)) is not None]
    assert 280 < len(profiles) < 390
    assert 0.4 < sum(profile.calm for profile in profiles) / len(profiles) < 0.6


def test_seed_with_rollouts_is_reproducible_across_processes() -> None:
    wanted = {"store-down", "store-answer-lost", "control-dies-acting"}
    seed = next(seed for seed in range(FIRST, 1000) if (found := has_rollouts(seed)) and wanted <= {*found.faults})
    call = (sys.executable, "-c", DIGEST.format(seed=seed))
    told = {
        subprocess.run(
            call, env={**os.environ, "PYTHONHASHSEED": str(n)}, check=True, capture_output=True, text=True
        ).stdout.strip()
        for n in range(3)
    }
    assert told == {chaos(seed).digest}
