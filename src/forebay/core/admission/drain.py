"""How fast a queue drains, and the Retry-After that follows from it."""

import math
from typing import Final

RETRY_AFTER_S_MAX: Final = 60
WINDOW_S: Final = 10
"""Rates are measured over the last ten seconds."""


class DrainRate:
    """Counts recent events, such as finished requests, in one-second slots."""

    __slots__ = ("_counts", "_latest", "_usual")

    def __init__(self) -> None:
        self._counts = [0] * WINDOW_S
        self._latest = -WINDOW_S
        self._usual = 0.0

    def count(self, now: float) -> None:
        """Count one event."""
        slot = int(now)
        if slot > self._latest:
            self._roll(slot)
        self._counts[self._latest % WINDOW_S] += 1

    def total(self, now: float) -> int:
        """Number of events in the window."""
        self._roll(int(now))
        return sum(self._counts)

    def pace_per_s(self, now: float) -> float:
        """Mean rate since the first event in the window: idle time before it does not count as slowness.

        Without events in the window, the last known rate; 0 if there never was an event.
        """
        self._roll(int(now))
        return self._pace() or self._usual

    def retry_after_s(self, waiting: int, now: float) -> int:
        """Whole seconds until a new request behind `waiting` others can expect to be served, at most
        `RETRY_AFTER_S_MAX`."""
        pace = self.pace_per_s(now)
        wait_s = (waiting + 1) / pace if pace else math.inf
        return max(1, math.ceil(wait_s)) if wait_s < RETRY_AFTER_S_MAX else RETRY_AFTER_S_MAX

    def _pace(self) -> float:
        counts, latest = self._counts, self._latest
        for age in range(WINDOW_S - 1, -1, -1):
            if counts[(latest - age) % WINDOW_S]:
                return sum(counts) / (age + 1)
        return 0.0

    def _roll(self, slot: int) -> None:
        if slot > self._latest:
            self._usual = self._pace() or self._usual
            for passed in range(max(self._latest + 1, slot - WINDOW_S + 1), slot + 1):
                self._counts[passed % WINDOW_S] = 0
            self._latest = slot
