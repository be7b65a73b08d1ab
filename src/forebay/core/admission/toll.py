"""What requests that run at a replica cost each other: next to nothing on a GPU, on a CPU as much as they use."""

from statistics import fmean
from typing import Final, NamedTuple

LEVELS: Final = 8
"""How full a replica is, in so many steps. For each its pace is kept: while batch work keeps it full, how quick it is
when it is not would be forgotten otherwise."""
APART_MIN: Final = 2
"""Levels that are closer tell nothing of a slope: how many ran beside an answer is known only roughly."""
FORGET_S: Final = 600.0
"""What was not seen for so long says nothing of now."""
EVERY_S: Final = 0.1
"""No more samples than that are taken."""
STEP: Final = 0.2
"""Weight of a new sample."""


class Line(NamedTuple):
    """The time between two tokens of a request: `base_s`, and `slope_s` more for each that runs; None: not known."""

    base_s: float
    slope_s: float | None


class _Seen(NamedTuple):
    at: float
    running: float
    pace_s: float


class Toll:
    """One replica: the time between two tokens by how many requests run there."""

    __slots__ = ("_next_at", "_seen")

    def __init__(self) -> None:
        self._seen: list[_Seen | None] = [None] * LEVELS
        self._next_at = 0.0

    def wants(self, now: float) -> bool:
        """Whether another sample is of use."""
        return now >= self._next_at

    def learn(self, running: float, places: int, pace_s: float, now: float) -> None:
        """An answer has ended whose tokens came so many seconds apart, while so many of its places were taken."""
        self._next_at = now + EVERY_S
        running = min(running, places)
        level = min(LEVELS - 1, int(LEVELS * running / places))
        last = self._seen[level]
        step = STEP if last is not None and now - last.at < FORGET_S else 1.0
        _, x, y = last or (now, 0.0, 0.0)
        self._seen[level] = _Seen(now, x + step * (running - x), y + step * (pace_s - y))

    def line(self, now: float) -> Line | None:
        """What was learned; None if nothing is known, as of a replica that streams no answers."""
        known = {n: each for n, each in enumerate(self._seen) if each is not None and now - each.at < FORGET_S}
        if not known:
            return None
        seen = known.values()
        x, y = fmean(each.running for each in seen), fmean(each.pace_s for each in seen)
        if max(known) - min(known) < APART_MIN:
            return Line(y, None)
        spread = sum((each.running - x) ** 2 for each in seen)
        slope_s = max(0.0, sum((each.running - x) * (each.pace_s - y) for each in seen) / spread)
        return Line(max(0.0, y - slope_s * x), slope_s)
