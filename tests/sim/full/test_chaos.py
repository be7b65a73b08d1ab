"""Whole clusters with faults: every seed keeps every rule and is reproducible."""

import os
import subprocess
import sys

import pytest

from forebay.sim.full.chaos import chaos

pytestmark = pytest.mark.interpreted

SEEDS = 50
REPEATED, REPEATS = 8, 30
"""A short run, so that it can be repeated."""
PROCESSES = 20
DIGEST = "from forebay.sim.full.chaos import chaos; print(chaos(int({seed})).digest)"


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, SEEDS))])
def test_cluster_with_faults_keeps_every_invariant(seed: int) -> None:
    verdict = chaos(seed)
    assert verdict.ok, "\n".join((verdict.command, str(verdict.profile), *verdict.violations))
    assert verdict.endings["complete"]


@pytest.mark.slow
def test_without_faults_no_client_is_disconnected_or_rejected() -> None:
    for seed in range(5):
        verdict = chaos(seed, faults=False)
        assert verdict.ok, "\n".join(verdict.violations)
        assert verdict.endings.keys() <= {"complete", "error", "left"}
        assert not verdict.counts.get("again")


@pytest.mark.slow
def test_chaos_seed_is_reproducible() -> None:
    assert len({chaos(REPEATED).digest for _ in range(REPEATS)}) == 1


@pytest.mark.slow
def test_chaos_seed_is_reproducible_across_processes() -> None:
    call = (sys.executable, "-c", DIGEST.format(seed=REPEATED))
    digests = set()
    for number in range(PROCESSES):
        env = {**os.environ, "PYTHONHASHSEED": str(number)}
        digests.add(subprocess.run(call, env=env, check=True, capture_output=True, text=True).stdout.strip())
    assert digests == {chaos(REPEATED).digest}


@pytest.mark.slow
def test_chaos_seeds_give_different_runs() -> None:
    assert len({chaos(seed, faults=False).digest for seed in range(3)}) == 3
