"""How many places batch work leaves free, so that more urgent requests find one at once.

A request that runs is not stopped once something of its answer was seen: an urgent one that finds every place of a
replica taken by batch work waits until one of those ends. So batch work leaves some places of every replica free. How
many is learned: as few as let all but one of `SHORT_ONCE_IN` urgent requests find one. That is a quantile, tracked by
stochastic approximation (Robbins and Monro 1951): up by one place when a request found none, down by so small a part
of one when it did that the two balance at that rate. Lengths, bursts and the number of replicas need no model.
"""

import math
from typing import Final

SHORT_ONCE_IN: Final = 200
"""One urgent request in so many may find no free place where batch work has taken them; p99 does not see it."""
STEP_DOWN: Final = 1 / (SHORT_ONCE_IN - 1)
SHARE_FIRST: Final = 0.25
"""Of a replica's places, what is left free before anything is known."""
QUIET_S: Final = 30.0
"""After so long without an urgent request batch work may have all the room there is."""


class Reserve:
    """Of one model: what its urgent requests, all that are not batch, have met lately."""

    __slots__ = ("_kept", "_urgent_at")

    def __init__(self) -> None:
        self._kept: float | None = None
        self._urgent_at = -math.inf

    def came(self, found: bool, places: int, now: float) -> None:
        """An urgent request has come while batch work was under way.

        `found`: it goes to a replica that has one of its `places` free; `places` is how many requests run there at
        once.
        """
        kept = SHARE_FIRST * places if self._kept is None else self._kept
        self._kept = max(0.0, kept - STEP_DOWN) if found else min(kept + 1.0, places - 1.0)
        self._urgent_at = now

    def seen(self, now: float) -> None:
        """Urgent requests are under way."""
        self._urgent_at = now

    def room(self, places: int, room: int, now: float) -> int:
        """Load at which a replica is full for batch work: `room` while nobody else is there, else some of `places`.

        At least 1: what is idle altogether takes batch work.
        """
        if now - self._urgent_at >= QUIET_S:
            return room
        kept = SHARE_FIRST * places if self._kept is None else self._kept
        return max(1, places - math.ceil(kept))
