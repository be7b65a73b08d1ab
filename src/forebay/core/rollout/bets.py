"""Tests of the mean of bounded differences by betting (Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", 2023).

Wealth is Π (1 + λ(d + drop)), for a few fixed λ small enough to keep it above 0. Under "the mean of each difference,
given those before, is at most -drop" it is a nonnegative supermartingale for λ > 0, and so is a mean of several.
"""

import math
from collections.abc import Sequence
from typing import Final

from forebay.core.rollout.odds import Evidence, mixed

STAKES: Final = (0.03, 0.1, 0.25, 0.5, 0.9)
"""As shares of the largest λ that cannot go bankrupt."""
NOTHING: Final = (0.0,) * (2 * len(STAKES))


def with_difference(bets: Sequence[float], difference: float, drop: float) -> tuple[float, ...]:
    """The bets after one more difference, canary minus stable, -1..1."""
    y = difference + drop
    strides = [-stake / (1 + drop) for stake in STAKES] + [stake / (1 - drop) for stake in STAKES]
    return tuple(log + math.log1p(stride * y) for log, stride in zip(bets, strides, strict=True))


def worse(bets: Sequence[float]) -> Evidence:
    """Evidence against "the canary is lower by at most `drop`"."""
    return mixed(bets[: len(STAKES)])


def fine(bets: Sequence[float]) -> Evidence:
    """Evidence against "the canary is lower by at least `drop`"."""
    return mixed(bets[len(STAKES) :])
