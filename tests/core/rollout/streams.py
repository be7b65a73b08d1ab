"""Drawn requests for the tests of rollouts."""

from collections.abc import Iterator
from random import Random

from forebay.core.rollout.values import Arm, Observation

STRATA = ("short", "long")
LONGER = 4.0
"""Times as long as the short ones take the long ones."""


def requests(
    rng: Random,
    several: int,
    *,
    share: float = 0.2,
    latency: float = 1.0,
    errors: float = 0.01,
    quality: float = 0.0,
    long_share: float = 0.5,
) -> Iterator[tuple[Observation, ...]]:
    """One after the other: TTFT, error and quality. All but the share of the canary is about what the canary does."""
    for _ in range(several):
        arm = Arm.CANARY if rng.random() < share else Arm.STABLE
        new = arm is Arm.CANARY
        stratum = STRATA[rng.random() < (long_share if new else 0.5)]
        ttft_s = rng.lognormvariate(0.0, 0.8) * (latency if new else 1.0) * (LONGER if stratum == "long" else 1.0)
        yield (
            Observation("ttft", arm, ttft_s, stratum),
            Observation("errors", arm, float(rng.random() < (errors if new else 0.01)), stratum),
            Observation("quality", arm, float(rng.random() < 0.8 - (quality if new else 0.0)), stratum),
        )


def batch(rng: Random, several: int, **about: float) -> list[Observation]:
    """All of them."""
    return [observation for request in requests(rng, several, **about) for observation in request]
