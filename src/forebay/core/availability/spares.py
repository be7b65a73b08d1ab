"""How many spare replicas an objective requires: N are needed, N+k exist, each is up for a share of its time.

A replica is up for the share a = MTBF / (MTBF + MTTR) of its time; one with several parts, all of which it needs (a
group of GPUs), for a to the power of their number. The probability that N of N+k are up is a binomial tail. Failures
are assumed to be independent: a common cause, such as a machine failing with all its replicas, is not included.
"""

import math
from dataclasses import dataclass
from typing import Final

SPARES_MAX: Final = 64
"""Search limit: an objective that this many do not meet is not met by more."""
EASE: Final = 0.8
"""Hysteresis: the number is only reduced if fewer spares use at most this share of the allowed failures."""


@dataclass(frozen=True, slots=True)
class FailureTimes:
    """Failure and repair of a part of a replica: mean times between failures and to repair, seconds."""

    mtbf_s: float
    mttr_s: float
    parts: int = 1
    """Number of parts, all of which a replica needs."""

    @property
    def part_up(self) -> float:
        """Share of its time for which a part is up."""
        return self.mtbf_s / (self.mtbf_s + self.mttr_s)

    @property
    def replica_up(self) -> float:
        """Share of its time for which a replica is up."""
        return self.part_up**self.parts


@dataclass(frozen=True, slots=True)
class AvailabilityEstimate:
    """The availability that a number of replicas gives, with its derivation. All shares are of time."""

    failing: FailureTimes
    needed: int
    spares: int
    switch_s: float
    """Time until a spare has replaced a failed replica."""
    enough: float
    """At least `needed` of all of them are up."""
    any: float
    """At least one is up."""
    switching: float
    """A failure has just happened, and the spare has not taken over yet."""

    @property
    def full(self) -> float:
        """All needed replicas serve."""
        return max(0.0, self.enough - self.switching)


def enough_share(needed: int, spares: int, replica_up: float) -> float:
    """The share of time for which at least `needed` of `needed + spares` replicas are up: a binomial tail."""
    total, down = needed + spares, 1.0 - replica_up
    if down <= 0.0 or needed <= 0:
        return 1.0
    if replica_up <= 0.0:
        return 0.0
    log_up, log_down = math.log(replica_up), math.log(down)
    terms = (
        math.exp(_log_choose(total, failed) + failed * log_down + (total - failed) * log_up)
        for failed in range(spares + 1)
    )
    return min(1.0, math.fsum(terms))


def spares_needed(needed: int, replica_up: float, target: float, had: int = 0) -> int | None:
    """The fewest spares with which `needed` replicas are up for the share `target` of time; None: too many.

    Fewer than the current `had` are only returned with a margin (`EASE`).
    """
    for spares in range(SPARES_MAX + 1):
        allowed = (1.0 - target) * (EASE if spares < had else 1.0)
        if 1.0 - enough_share(needed, spares, replica_up) <= allowed:
            return spares
    return None


def estimate_availability(needed: int, spares: int, failing: FailureTimes, switch_s: float) -> AvailabilityEstimate:
    """The availability of `needed` replicas with `spares` ready spares; without spares there is no switching."""
    rate_per_s = needed * failing.parts / failing.mtbf_s
    return AvailabilityEstimate(
        failing=failing,
        needed=needed,
        spares=spares,
        switch_s=switch_s,
        enough=enough_share(needed, spares, failing.replica_up),
        any=enough_share(1, needed + spares - 1, failing.replica_up) if needed + spares else 0.0,
        switching=min(1.0, rate_per_s * switch_s) if spares else 0.0,
    )


def _log_choose(total: int, some: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(some + 1) - math.lgamma(total - some + 1)
