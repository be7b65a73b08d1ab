"""How fast a line moves, and what that means for who is turned away."""

import math
from typing import Final

RETRY_AFTER_S_MAX: Final = 60
WINDOW_S: Final = 10
"""Events of the last ten seconds make a rate."""


class DrainRate:
    """How many events there have been lately, requests finished for one, counted in one-second slots."""

    __slots__ = ("_counts", "_latest", "_usual")

    def __init__(self) -> None:
        self._counts = [0] * WINDOW_S
        self._latest = -WINDOW_S
        self._usual = 0.0

    def count(self, now: float) -> None:
        """It has happened once more."""
        slot = int(now)
        if slot > self._latest:
            self._roll(slot)
        self._counts[self._latest % WINDOW_S] += 1

    def total(self, now: float) -> int:
        """How often it happened in the window."""
        self._roll(int(now))
        return sum(self._counts)

    def pace_per_s(self, now: float) -> float:
        """Mean from the first event in the window on: who had nothing to do before was not slow.

        Without any in the window, what it was the last time; 0 if there never was one.
        """
        self._roll(int(now))
        return self._pace() or self._usual

    def retry_after_s(self, waiting: int, now: float) -> int:
        """Whole seconds until a newcomer behind `waiting` others could expect a place."""
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
