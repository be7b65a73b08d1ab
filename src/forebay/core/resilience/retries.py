"""The retry budget, which keeps one bad replica from doubling the load on the others."""

from typing import Final

from forebay.core.admission.drain import WINDOW_S, DrainRate

SHARE: Final = 0.2
FLOOR_PER_S: Final = 3.0
"""Lets a gateway with little traffic retry at all, when a share of its few requests is less than one."""


class RetryBudget:
    """Allows retries up to `share` of the last ten seconds' requests, plus `floor_per_s`.

    Retries and hedges of one gateway draw on it. Over any t seconds there are at most `share` x the requests of that
    time and the ten seconds before it + `floor_per_s` x (t + 11) retries.
    """

    __slots__ = ("_floor", "_requests", "_retries", "_share")

    def __init__(self, share: float = SHARE, floor_per_s: float = FLOOR_PER_S) -> None:
        self._share = share
        self._floor = floor_per_s * WINDOW_S
        self._requests = DrainRate()
        self._retries = DrainRate()

    def request(self, now: float) -> None:
        """Count a client's request: a first attempt."""
        self._requests.count(now)

    def allow(self, now: float) -> bool:
        """Whether another attempt is allowed now; if so, it is counted."""
        if self._retries.total(now) + 1 > self._share * self._requests.total(now) + self._floor:
            return False
        self._retries.count(now)
        return True
