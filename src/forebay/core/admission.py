"""The waiting room of one model: bounded, first come first served, with deadlines and an honest Retry-After."""

import math
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from forebay.core.errors import Code

RETRY_AFTER_S_MAX: Final = 60
WINDOW_S: Final = 10
"""Completions of the last ten seconds make the drain rate."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no place; come back after `retry_after_s`."""

    code: Code
    retry_after_s: int


class DrainRate:
    """How many requests per second have been finished lately, counted in one-second slots."""

    __slots__ = ("_counts", "_latest")

    def __init__(self) -> None:
        self._counts = [0] * WINDOW_S
        self._latest = -WINDOW_S

    def count(self, now: float) -> None:
        """A request has been finished."""
        self._roll(int(now))
        self._counts[self._latest % WINDOW_S] += 1

    def per_s(self, now: float) -> float:
        """Mean over the window."""
        self._roll(int(now))
        return sum(self._counts) / WINDOW_S

    def _roll(self, slot: int) -> None:
        if slot > self._latest:
            for passed in range(max(self._latest + 1, slot - WINDOW_S + 1), slot + 1):
                self._counts[passed % WINDOW_S] = 0
            self._latest = slot


class WaitingRoom(Generic[T]):
    """Requests that wait for a replica, in order. `size_max` and `timeout_s` may change at any time."""

    __slots__ = ("_deadlines", "rate", "size_max", "timeout_s")

    def __init__(self, size_max: int, timeout_s: float) -> None:
        self.size_max = size_max
        self.timeout_s = timeout_s
        self.rate = DrainRate()
        self._deadlines: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def enter(self, item: T, now: float) -> Refused | None:
        """Join the end of the line, or be refused because it is full."""
        if len(self._deadlines) >= self.size_max:
            return Refused(Code.QUEUE_FULL, self.retry_after_s(now))
        self._deadlines[item] = now + self.timeout_s
        return None

    def enter_again(self, item: T, deadline: float) -> None:
        """Go to the front: it was admitted before, so the bound does not apply and its deadline stands."""
        self._deadlines = {item: deadline, **self._deadlines}

    def leave(self, item: T) -> None:
        """The item got a replica or is no longer wanted."""
        self._deadlines.pop(item, None)

    def waiting(self) -> list[T]:
        """All items in order."""
        return list(self._deadlines)

    def expire(self, now: float) -> list[T]:
        """Take out the items whose deadline has come."""
        late = [item for item, deadline in self._deadlines.items() if deadline <= now]
        for item in late:
            del self._deadlines[item]
        return late

    def retry_after_s(self, now: float) -> int:
        """Whole seconds until a newcomer could expect a place: the line's length over the drain rate."""
        rate = self.rate.per_s(now)
        wait_s = (len(self._deadlines) + 1) / rate if rate else math.inf
        return max(1, math.ceil(wait_s)) if wait_s < RETRY_AFTER_S_MAX else RETRY_AFTER_S_MAX
