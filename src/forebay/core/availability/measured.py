"""How replicas fail, by what was seen: a prior that counts as one failure, and what has happened since.

Failures are taken to come at a steady rate (a Poisson process), whose gamma prior weighs as much as `PRIOR_FAILURES`
failures: a cluster that is new is neither perfect nor hopeless. The bound is the usual one for a Poisson rate; where
no failure was seen, it is the rule of three, 3 / time.
"""

import math
from dataclasses import dataclass
from typing import Final

from forebay.core.availability.spares import Failing

PRIOR_MTBF_S: Final = 30 * 86_400.0
"""A replica fails once in 30 days until more is known: its process, its driver, its machine, whatever comes first."""
PRIOR_MTTR_S: Final = 900.0
"""And it takes a quarter of an hour until it is back."""
PRIOR_FAILURES: Final = 1.0
"""So many failures the prior counts for."""
CONFIDENCE: Final = 0.95
BISECTIONS: Final = 60


@dataclass(frozen=True, slots=True)
class Lived:
    """What has become of a model's replicas: sums over all of them. Times in seconds."""

    replica_s: float = 0.0
    """Time for which they were ready."""
    failures: int = 0
    repairs: int = 0
    repair_s: float = 0.0
    """From failures until the same places were ready again, of `repairs`."""
    promotions: int = 0
    promotion_s: float = 0.0
    """From a failure being known until gateways were told of the stand-in."""
    starts: int = 0
    start_s: float = 0.0
    """From being placed until ready, of `starts`."""

    def __add__(self, other: "Lived") -> "Lived":
        return Lived(
            self.replica_s + other.replica_s,
            self.failures + other.failures,
            self.repairs + other.repairs,
            self.repair_s + other.repair_s,
            self.promotions + other.promotions,
            self.promotion_s + other.promotion_s,
            self.starts + other.starts,
            self.start_s + other.start_s,
        )


def failing(lived: Lived) -> Failing:
    """The mean times to reckon with: of the prior and what was seen, each by its weight."""
    return Failing(
        mtbf_s=(PRIOR_FAILURES * PRIOR_MTBF_S + lived.replica_s) / (PRIOR_FAILURES + lived.failures),
        mttr_s=(PRIOR_FAILURES * PRIOR_MTTR_S + lived.repair_s) / (PRIOR_FAILURES + lived.repairs),
    )


def mtbf_at_least_s(lived: Lived) -> float:
    """With `CONFIDENCE`, by what was seen alone, replicas fail no more often than once in this time, seconds."""
    return lived.replica_s / _failures_at_most(lived.failures)


def _failures_at_most(seen: int) -> float:
    """The largest mean of a Poisson number that gives so few with the probability 1 - `CONFIDENCE`."""
    low, high = 0.0, 10.0 + 3.0 * seen
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _at_most(seen, middle) > 1.0 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _at_most(seen: int, mean: float) -> float:
    """The probability of a Poisson number no larger than `seen`."""
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(seen + 1))
