"""Failure statistics of replicas: observations combined with a prior.

Failures are modelled as a Poisson process, whose gamma prior weighs as much as `PRIOR_FAILURES` failures: a new
cluster is neither perfect nor hopeless. The bound is the usual one for a Poisson rate; without observed failures it
is the rule of three, 3 / time.
"""

import math
from dataclasses import dataclass
from typing import Final

from forebay.core.availability.spares import FailureTimes

PRIOR_MTBF_S: Final = 30 * 86_400.0
"""Prior: a replica fails once in 30 days, whether through its process, driver or machine."""
PRIOR_MTTR_S: Final = 900.0
"""Prior: a repair takes a quarter of an hour."""
PRIOR_FAILURES: Final = 1.0
"""Weight of the prior, in failures."""
CONFIDENCE: Final = 0.95
BISECTIONS: Final = 60


@dataclass(frozen=True, slots=True)
class LifetimeSums:
    """Lifetime sums over a model's replicas. Times in seconds."""

    replica_s: float = 0.0
    """Time for which they were ready."""
    failures: int = 0
    repairs: int = 0
    repair_s: float = 0.0
    """From failures until the same slots were ready again, over `repairs`."""
    promotions: int = 0
    promotion_s: float = 0.0
    """From detection of a failure until gateways were sent the standby replica."""
    starts: int = 0
    start_s: float = 0.0
    """From placement until ready, over `starts`."""

    def __add__(self, other: "LifetimeSums") -> "LifetimeSums":
        return LifetimeSums(
            self.replica_s + other.replica_s,
            self.failures + other.failures,
            self.repairs + other.repairs,
            self.repair_s + other.repair_s,
            self.promotions + other.promotions,
            self.promotion_s + other.promotion_s,
            self.starts + other.starts,
            self.start_s + other.start_s,
        )


def failure_times(lived: LifetimeSums) -> FailureTimes:
    """Estimated mean times: prior and observations, weighted."""
    return FailureTimes(
        mtbf_s=(PRIOR_FAILURES * PRIOR_MTBF_S + lived.replica_s) / (PRIOR_FAILURES + lived.failures),
        mttr_s=(PRIOR_FAILURES * PRIOR_MTTR_S + lived.repair_s) / (PRIOR_FAILURES + lived.repairs),
    )


def mtbf_at_least_s(lived: LifetimeSums) -> float:
    """Lower confidence bound (`CONFIDENCE`) of the time between failures, from observations alone, seconds."""
    return lived.replica_s / _failures_at_most(lived.failures)


def _failures_at_most(seen: int) -> float:
    """The largest Poisson mean for which so few are observed with probability 1 - `CONFIDENCE`."""
    low, high = 0.0, 10.0 + 3.0 * seen
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _at_most(seen, middle) > 1.0 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _at_most(seen: int, mean: float) -> float:
    """The probability that a Poisson variable is at most `seen`."""
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(seen + 1))
