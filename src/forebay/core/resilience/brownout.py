"""Brown-outs: a replica that answers, but much later or at a much lower pace than its peers, or lets streams stall.

The time to first token alone does not tell: clients that ask anew as soon as they have their answer ask a replica
that stands still now and then just when it does not.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

RECENT: Final = 32
"""The time to first token, and the pace, of so many requests is kept for each replica."""
RECENT_MIN: Final = 5
"""Of fewer there is no telling."""
RECENT_S: Final = 30.0
"""What is older says nothing of now. A replica that gets no requests any more is thereby given another chance."""
STALLS_MAX: Final = 3
"""So many stalled streams within RECENT_S are as bad as a slow start of answers."""
SLOW_RATIO: Final = 3.0
WELL_RATIO: Final = 1.5
"""Slow is above three times the pool's time to first token, well again below one and a half times."""
SLOW_EXCESS_S: Final = 0.05
"""Being slower by less than this is nothing that a user notices, whatever the ratio."""
PACE_EXCESS_S: Final = 0.02
"""The same for each token after the first."""
TURN_S: Final = 5.0
"""It has to be slow, or well, for so long without a break before that counts."""


class BrownOut:
    """Whether one replica is slow. `active` only changes in `judge`, which is called about once a second."""

    __slots__ = ("_paces", "_recent", "_stalls", "_turning_since", "active", "stalling")

    def __init__(self) -> None:
        self.active = False
        self.stalling = False
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._paces: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._stalls: deque[float] = deque(maxlen=STALLS_MAX)
        self._turning_since: float | None = None

    def note_ttft(self, seconds: float, now: float) -> None:
        """An answer has begun, so long after its request was sent to the replica."""
        self._recent.append((now, seconds))

    def note_paces(self, paces_s: Iterable[float], now: float) -> None:
        """Answers have ended whose tokens after the first came so many seconds apart."""
        self._paces.extend((now, seconds) for seconds in paces_s)

    def note_stall(self, now: float) -> None:
        """A stream has been silent for longer than its reader should have to wait."""
        self._stalls.append(now)

    def ttft_s(self, now: float) -> float | None:
        """The median of late; None if too few answers have begun."""
        return _of_late(self._recent, now)

    def pace_s(self, now: float) -> float | None:
        """The median time of late from token to token; None if too few answers have ended."""
        return _of_late(self._paces, now)

    def judge(self, ttft_s: float | None, pace_s: float | None, now: float) -> None:
        """Compare it with the medians of its pool, see `pool_ttft_s` and `pool_pace_s`."""
        ratio = WELL_RATIO if self.active else SLOW_RATIO
        slow = _above(self.ttft_s(now), ttft_s, ratio, SLOW_EXCESS_S)
        slow = slow or _above(self.pace_s(now), pace_s, ratio, PACE_EXCESS_S)
        self.stalling = len(self._stalls) == STALLS_MAX and now - self._stalls[0] <= RECENT_S
        if (slow or self.stalling) is self.active:
            self._turning_since = None
        elif self._turning_since is None:
            self._turning_since = now
        elif now - self._turning_since >= TURN_S:
            self.active = not self.active
            self._turning_since = None


def pool_ttft_s(pool: Iterable[BrownOut], now: float) -> float | None:
    """The median of the replicas' medians; of a pair the lower, so that the slow one is held against the other."""
    return _pooled(replica.ttft_s(now) for replica in pool)


def pool_pace_s(pool: Iterable[BrownOut], now: float) -> float | None:
    """The same of their paces."""
    return _pooled(replica.pace_s(now) for replica in pool)


def _above(own_s: float | None, pool_s: float | None, ratio: float, excess_s: float) -> bool:
    return own_s is not None and pool_s is not None and own_s > max(ratio * pool_s, pool_s + excess_s)


def _of_late(noted: Iterable[tuple[float, float]], now: float) -> float | None:
    recent = [seconds for at, seconds in noted if now - at <= RECENT_S]
    return _median(recent) if len(recent) >= RECENT_MIN else None


def _pooled(medians_s: Iterable[float | None]) -> float | None:
    known = [own_s for own_s in medians_s if own_s is not None]
    return _median(known) if known else None


def _median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
