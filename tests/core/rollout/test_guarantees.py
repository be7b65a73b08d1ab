"""Canaries exactly at the tolerance, judged after every batch: hardly any is ever called worse, or fine."""

from collections.abc import Callable
from math import exp
from random import Random

import pytest

from forebay.core.rollout.judging import judge
from forebay.core.rollout.observing import begin, observe
from forebay.core.rollout.values import Arm, Metric, Observation, Rate, Rules, Score, Time

RUNS = 60
WRONG_MAX = 8
"""Of 60 at five in a hundred, more than that is a chance of one in a hundred, and the true share is well below."""
REQUESTS = 1500
BATCH = 5
SPELL = 100


def errors(rng: Random, new: bool, at: int) -> float:
    return float(rng.random() < (0.1 / 1.05 if new else 0.05))


def heavy(rng: Random, new: bool, at: int) -> float:
    return exp(rng.normalvariate(0.0, 1.0) / max(0.2, rng.random())) * (1.2 if new else 1.0)


def under_load(rng: Random, new: bool, at: int) -> float:
    return rng.lognormvariate(1.0 if at // SPELL % 2 else 0.0, 0.8) * (1.2 if new else 1.0)


def score(rng: Random, new: bool, at: int) -> float:
    return float(rng.random() < (0.7 if new else 0.8))


def pair(rng: Random, new: bool, at: int) -> float:
    return score(rng, True, at) - score(rng, False, at)


TIME = Time("m", ratio=1.2, tail=0.9, tail_ratio=1.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "draw"),
    [
        (Rate("m", ratio=2.0, floor=0.001), errors),
        (TIME, heavy),
        (TIME, under_load),
        (Score("m", drop=0.1), score),
        (Score("m", drop=0.1, paired=True), pair),
    ],
    ids=["errors", "heavy", "load", "score", "pairs"],
)
def test_error_probability_holds_under_continuous_monitoring(
    metric: Metric, draw: Callable[[Random, bool, int], float]
) -> None:
    rules = Rules((metric,))
    wrong: dict[str, int] = {}
    for seed in range(RUNS):
        rng, state, calls = Random(seed), begin(rules), set()
        for at in range(0, REQUESTS, BATCH):
            arms = [rng.random() < 0.3 for _ in range(BATCH)]
            found = [Observation("m", Arm.CANARY if new else Arm.STABLE, draw(rng, new, at)) for new in arms]
            state = observe(rules, state, found)
            for part in judge(rules, state).parts:
                calls |= {f"{part.part} worse"} if part.worse_p <= rules.rollback_alpha else set()
                calls |= {f"{part.part} fine"} if part.fine_p <= rules.promote_alpha else set()
        for call in calls:
            wrong[call] = wrong.get(call, 0) + 1

    assert max(wrong.values(), default=0) <= WRONG_MAX, wrong
