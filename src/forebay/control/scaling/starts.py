"""How long replicas take from being placed to being ready."""

from collections.abc import Iterable
from typing import Final

from forebay.control.scaling.reading import model_of
from forebay.core.lifecycle import Event
from forebay.core.reconcile import Move, UnitKey

KEPT: Final = 16
"""How many starts are kept of each revision."""
REVISIONS_MAX: Final = 8
"""Of a model."""
SHARE: Final = 0.9

Taken = dict[str, tuple[float, ...]]
"""Durations in seconds of the last starts, newest last, by revision; the revision started last comes last."""


class Starts:
    """Follows the moves of slots. Units that were already running when control started are not measured."""

    def __init__(self) -> None:
        self._placed: dict[UnitKey, float] = {}

    def look(self, moves: Iterable[Move], now: float) -> list[tuple[str, str, float]]:
        """Starts that have just succeeded, as (model, slot, seconds)."""
        done = []
        for move in moves:
            key = move.slot, move.generation
            if move.event is Event.PLACED:
                self._placed[key] = now
            elif move.event is Event.SERVES and key in self._placed:
                done.append((model_of(move.slot), move.slot, now - self._placed.pop(key)))
            elif move.event not in (Event.LOADS, Event.SUFFERS):
                self._placed.pop(key, None)
        return done


def with_start(taken: Taken, revision: str, seconds: float) -> Taken:
    """The durations with one more start of a revision."""
    found = {name: each for name, each in taken.items() if name != revision}
    while len(found) >= REVISIONS_MAX:
        del found[next(iter(found))]
    return {**found, revision: (*taken.get(revision, ()), round(seconds, 3))[-KEPT:]}


def cold_start_s(taken: Taken, revision: str) -> float | None:
    """The 90th percentile of a revision's start times; of the previous revision if it was never started; None:
    unknown."""
    times = taken.get(revision) or next(iter(reversed(taken.values())), ())
    if not times:
        return None
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(SHARE * len(ordered)))]
