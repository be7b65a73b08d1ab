"""Which slots of a model belong to which of two revisions: `chat-3` has the index 3.

A slot keeps its revision: a promoted revision keeps its slots, and no replica restarts because of that.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """The indices that each revision holds, ascending and disjoint."""

    stable: tuple[int, ...]
    canary: tuple[int, ...] = ()

    @property
    def spare(self) -> int:
        """Index of the spare replica that serves while the stable revision's are replaced."""
        return lowest((*self.stable, *self.canary))


def lowest(taken: Collection[int]) -> int:
    """The lowest free index."""
    index = 0
    while index in taken:
        index += 1
    return index


def resized(held: Collection[int], several: int, taken: Collection[int] = ()) -> tuple[int, ...]:
    """`several` indices: the lowest of those held, then the lowest free ones."""
    found = sorted(held)[:several]
    while len(found) < several:
        found.append(lowest((*found, *taken)))
    return tuple(sorted(found))


def with_stable(held: Held, several: int) -> Held:
    """The indices with this many replicas of the stable revision."""
    return Held(resized(held.stable, several, held.canary), held.canary)


def with_canary(held: Held, several: int) -> Held:
    """The indices with this many replicas of the canary. The spare's index stays free, even while there is no
    spare."""
    return Held(held.stable, resized(held.canary, several, (*held.stable, held.spare)))
