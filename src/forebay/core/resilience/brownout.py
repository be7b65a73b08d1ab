"""Brown-out detection: a replica that answers, but much later or slower than its peers, or whose streams stall.

The time to first token alone is not enough: with closed-loop clients, a replica that freezes intermittently mostly
gets new requests while it is not frozen. And of answers that are not streamed only the whole time is known.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

RECENT: Final = 32
"""Samples of time to first token, of time per token, and of the time of whole answers, that are kept per replica."""
RECENT_MIN: Final = 5
"""Fewer samples are not judged."""
RECENT_S: Final = 30.0
"""Older samples are ignored. So a replica that no longer gets requests is given another chance."""
STALLS_MAX: Final = 3
"""This many stalled streams within RECENT_S count as slow."""
SLOW_RATIO: Final = 3.0
WELL_RATIO: Final = 1.5
"""Slow above three times the pool's median, healthy again below one and a half times (hysteresis)."""
SLOW_EXCESS_S: Final = 0.05
"""Smaller differences of the time to first token, or of a whole answer, are imperceptible, whatever the ratio."""
PACE_EXCESS_S: Final = 0.02
"""The same for the time per token."""
TURN_S: Final = 5.0
"""The condition must hold this long without interruption before the state changes."""


class BrownOut:
    """Whether one replica is slow. `active` changes only in `judge`, which is called about once a second."""

    __slots__ = ("_paces", "_recent", "_stalls", "_turning_since", "_wholes", "active", "stalling")

    def __init__(self) -> None:
        self.active = False
        self.stalling = False
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._paces: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._wholes: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._stalls: deque[float] = deque(maxlen=STALLS_MAX)
        self._turning_since: float | None = None

    def note_ttft(self, seconds: float, now: float) -> None:
        """Record a time to first token, measured from when the request was sent to the replica."""
        self._recent.append((now, seconds))

    def note_paces(self, paces_s: Iterable[float], now: float) -> None:
        """Record the times per token of finished responses."""
        self._paces.extend((now, seconds) for seconds in paces_s)

    def note_whole(self, seconds: float, now: float) -> None:
        """Record the time of an answer that was not streamed; of those of different lengths, what a usual one would
        have taken."""
        self._wholes.append((now, seconds))

    def note_stall(self, now: float) -> None:
        """Record a stream that has been silent for longer than is acceptable."""
        self._stalls.append(now)

    def ttft_s(self, now: float) -> float | None:
        """Recent median time to first token; None if there are too few samples."""
        return _of_late(self._recent, now)

    def pace_s(self, now: float) -> float | None:
        """Recent median time per token; None if there are too few samples."""
        return _of_late(self._paces, now)

    def whole_s(self, now: float) -> float | None:
        """Recent upper quartile of the time of a whole answer; None if there are too few samples.

        Not the median: a replica that freezes gets its requests in between, so most of them may be quick.
        """
        return _of_late(self._wholes, now, 0.75)

    def judge(self, ttft_s: float | None, pace_s: float | None, whole_s: float | None, now: float) -> None:
        """Compare the replica with the medians of its pool, see `pool_ttft_s`, `pool_pace_s` and `pool_whole_s`."""
        ratio = WELL_RATIO if self.active else SLOW_RATIO
        slow = _above(self.ttft_s(now), ttft_s, ratio, SLOW_EXCESS_S)
        slow = slow or _above(self.pace_s(now), pace_s, ratio, PACE_EXCESS_S)
        slow = slow or _above(self.whole_s(now), whole_s, ratio, SLOW_EXCESS_S)
        self.stalling = len(self._stalls) == STALLS_MAX and now - self._stalls[0] <= RECENT_S
        if (slow or self.stalling) is self.active:
            self._turning_since = None
        elif self._turning_since is None:
            self._turning_since = now
        elif now - self._turning_since >= TURN_S:
            self.active = not self.active
            self._turning_since = None


def pool_ttft_s(pool: Iterable[BrownOut], now: float) -> float | None:
    """Median of the replicas' medians; of an even number the lower one, so that a slow replica of a pair stands
    out."""
    return _pooled(replica.ttft_s(now) for replica in pool)


def pool_pace_s(pool: Iterable[BrownOut], now: float) -> float | None:
    """The same for times per token."""
    return _pooled(replica.pace_s(now) for replica in pool)


def pool_whole_s(pool: Iterable[BrownOut], now: float) -> float | None:
    """The same for whole answers, by their upper quartiles."""
    return _pooled(replica.whole_s(now) for replica in pool)


def _above(own_s: float | None, pool_s: float | None, ratio: float, excess_s: float) -> bool:
    return own_s is not None and pool_s is not None and own_s > max(ratio * pool_s, pool_s + excess_s)


def _of_late(noted: Iterable[tuple[float, float]], now: float, share: float = 0.5) -> float | None:
    recent = [seconds for at, seconds in noted if now - at <= RECENT_S]
    return _quantile(recent, share) if len(recent) >= RECENT_MIN else None


def _pooled(medians_s: Iterable[float | None]) -> float | None:
    known = [own_s for own_s in medians_s if own_s is not None]
    return _quantile(known, 0.5) if known else None


def _quantile(values: list[float], share: float) -> float:
    """Of two that are as near, the lower one."""
    return sorted(values)[int((len(values) - 1) * share)]
