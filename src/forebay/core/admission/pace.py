"""How concurrent requests slow each other at a replica: hardly on a GPU, in proportion to their number on a CPU."""

from statistics import fmean
from typing import Final, NamedTuple

LEVELS: Final = 8
"""Number of load levels. Each keeps its own measurement: while batch work keeps a replica full, its speed when it is
not full would otherwise be forgotten."""
APART_MIN: Final = 2
"""Levels closer than this give no slope: the concurrency during a response is known only roughly."""
FORGET_S: Final = 600.0
"""Older measurements are ignored."""
EVERY_S: Final = 0.1
"""Minimum time between samples."""
STEP: Final = 0.2
"""Weight of a new sample."""


class PaceLine(NamedTuple):
    """Time per token: `base_s`, plus `slope_s` per running request; None: not known."""

    base_s: float
    slope_s: float | None


class _Seen(NamedTuple):
    at: float
    running: float
    pace_s: float


class PaceModel:
    """Time per token at one replica as a function of how many requests run there."""

    __slots__ = ("_next_at", "_seen")

    def __init__(self) -> None:
        self._seen: list[_Seen | None] = [None] * LEVELS
        self._next_at = 0.0

    def wants(self, now: float) -> bool:
        """Whether another sample is due."""
        return now >= self._next_at

    def learn(self, running: float, places: int, pace_s: float, now: float) -> None:
        """A response has ended whose time per token was `pace_s`, while `running` of the replica's slots were in
        use."""
        self._next_at = now + EVERY_S
        running = min(running, places)
        level = min(LEVELS - 1, int(LEVELS * running / places))
        last = self._seen[level]
        step = STEP if last is not None and now - last.at < FORGET_S else 1.0
        _, x, y = last or (now, 0.0, 0.0)
        self._seen[level] = _Seen(now, x + step * (running - x), y + step * (pace_s - y))

    def line(self, now: float) -> PaceLine | None:
        """The fitted line; None if nothing is known, as for a replica that streams no responses."""
        known = {n: each for n, each in enumerate(self._seen) if each is not None and now - each.at < FORGET_S}
        if not known:
            return None
        seen = known.values()
        x, y = fmean(each.running for each in seen), fmean(each.pace_s for each in seen)
        if max(known) - min(known) < APART_MIN:
            return PaceLine(y, None)
        spread = sum((each.running - x) ** 2 for each in seen)
        slope_s = max(0.0, sum((each.running - x) * (each.pace_s - y) for each in seen) / spread)
        return PaceLine(max(0.0, y - slope_s * x), slope_s)
