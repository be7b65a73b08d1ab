"""How many spares a promise takes: N replicas are needed, N+k are there, and each is up for a share of its time.

A replica is up for the share a = MTBF / (MTBF + MTTR) of its time; one that consists of several parts, all of which
it needs (a group of GPUs), for a to the power of their number. That N of N+k are up at a moment then has the
probability of a binomial tail. It is taken for granted that replicas fail by themselves: what takes several down at
once, such as a machine with all of its replicas, is not in these figures.
"""

import math
from dataclasses import dataclass
from typing import Final

SPARES_MAX: Final = 64
"""No more are looked for: what so many do not keep is not kept by more."""
EASE: Final = 0.8
"""Fewer spares than there are have to need no more than this share of what may fail: so the number does not waver."""


@dataclass(frozen=True, slots=True)
class Failing:
    """How a part of a replica fails and comes back: mean times between failures, and until repair, seconds."""

    mtbf_s: float
    mttr_s: float
    parts: int = 1
    """A replica needs all of so many."""

    @property
    def part_up(self) -> float:
        """Share of its time for which a part is up."""
        return self.mtbf_s / (self.mtbf_s + self.mttr_s)

    @property
    def replica_up(self) -> float:
        """Share of its time for which a replica is up."""
        return self.part_up**self.parts


@dataclass(frozen=True, slots=True)
class Promise:
    """What a number of replicas can promise, and how that comes about. All shares are of time."""

    failing: Failing
    needed: int
    spares: int
    switch_s: float
    """Until a spare has taken the place of one that failed."""
    enough: float
    """At least `needed` of all of them are up."""
    any: float
    """At least one is up."""
    switching: float
    """A failure has just happened, and the spare is not in its place yet."""

    @property
    def full(self) -> float:
        """As many serve as are needed."""
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

    With fewer than it `had` it is content only if they are enough with some ease.
    """
    for spares in range(SPARES_MAX + 1):
        allowed = (1.0 - target) * (EASE if spares < had else 1.0)
        if 1.0 - enough_share(needed, spares, replica_up) <= allowed:
            return spares
    return None


def promise(needed: int, spares: int, failing: Failing, switch_s: float) -> Promise:
    """What `needed` replicas with so many ready spares can promise; without spares nothing is switched."""
    rate_per_s = needed * failing.parts / failing.mtbf_s
    return Promise(
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
