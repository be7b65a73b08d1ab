"""Requests of two arms, drawn: what a stable and a canary revision would have answered."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.core.rollout.values import Arm, Observation

STRATA: Final = 4
SIGMA: Final = 0.8
"""Of the logarithm of the TTFT within a stratum."""
SPREAD: Final = 0.5
"""From one stratum to the next, of the same logarithm."""
TTFT_S: Final = 0.2
ERRORS: Final = 0.001
QUALITY: Final = 0.8
"""Share of answers that pass; each is right or wrong, which is the most that a mean of 0.8 can vary."""
BATCH_S: Final = 10
EVEN: Final = (0.25, 0.25, 0.25, 0.25)
REPLICAS: Final = 20
SPELL_OF: Final = 3.0
SPELL_S: Final = 30.0
SPELL_EVERY_S: Final = 600.0
ARMS: Final = (Arm.STABLE, Arm.CANARY)


class Scenario(NamedTuple):
    """What is different about the canary, and about the world."""

    errors: float = ERRORS
    latency: float = 1.0
    """Times the stable arm's."""
    quality: float = 0.0
    """Less than the stable arm's."""
    tail: float = 1.0
    """One request of ten takes so many times as long."""
    mix: tuple[float, ...] = EVEN
    """Shares of strata among the canary's requests."""
    spread: float = 1.0
    """Times the stable arm's sigma."""
    load: float = 0.0
    """Standard deviation of the logarithm by which both arms' TTFT wanders, within minutes."""
    spells: bool = False
    """Each of REPLICAS, of which the canary has one, is slow by itself for half a minute every ten."""


class Moment(NamedTuple):
    """What is the same for all requests of a batch."""

    wander: float
    slow: NDArray[np.bool_]
    """By replica."""


class Drawn(NamedTuple):
    """The requests of BATCH_S seconds."""

    canary: NDArray[np.bool_]
    stratum: NDArray[np.int64]
    errors: NDArray[np.bool_]
    ttft_s: NDArray[np.float64]
    score: NDArray[np.float64]

    def observations(self) -> list[Observation]:
        """As the product counts them."""
        arms = [ARMS[canary] for canary in self.canary.tolist()]
        strata = [str(stratum) for stratum in self.stratum.tolist()]
        found = []
        for name, figures in (("errors", self.errors), ("ttft", self.ttft_s), ("quality", self.score)):
            values = figures.astype(float).tolist()
            found += [Observation(name, *row) for row in zip(arms, values, strata, strict=True)]
        return found


def batches(rng: np.random.Generator, scenario: Scenario, rps: float, share: float, last_s: float) -> Iterator[Drawn]:
    """One after the other for so long."""
    wander = 0.0
    slow = np.zeros(REPLICAS, dtype=bool)
    for _ in range(int(last_s / BATCH_S)):
        keep = np.exp(-BATCH_S / 60)
        wander = keep * wander + np.sqrt(1 - keep * keep) * rng.normal(0, scenario.load) if scenario.load else 0.0
        ends = rng.random(REPLICAS) < BATCH_S / SPELL_S
        begins = rng.random(REPLICAS) < BATCH_S / SPELL_EVERY_S
        slow = np.where(slow, ~ends, begins)
        yield _drawn(rng, scenario, rng.random(rng.poisson(rps * BATCH_S)) < share, Moment(wander, slow))


def _drawn(rng: np.random.Generator, scenario: Scenario, canary: NDArray[np.bool_], now: Moment) -> Drawn:
    several = len(canary)
    stratum = np.where(canary, rng.choice(STRATA, several, p=scenario.mix), rng.integers(0, STRATA, several))
    replica = np.where(canary, 0, rng.integers(1, REPLICAS, several))
    in_spell = now.slow[replica]
    chance = np.where(canary, scenario.errors, ERRORS)
    sigma = SIGMA * np.where(canary, scenario.spread, 1.0)
    log = rng.normal(0, 1, several) * sigma + SPREAD * stratum + now.wander
    factor = np.where(canary, scenario.latency, 1.0) * np.where(scenario.spells & in_spell, SPELL_OF, 1.0)
    factor *= np.where(canary & (rng.random(several) < 0.1), scenario.tail, 1.0)
    passed = rng.random(several) < QUALITY - np.where(canary, scenario.quality, 0.0)
    return Drawn(canary, stratum, rng.random(several) < chance, TTFT_S * np.exp(log) * factor, passed.astype(float))
