"""Which slots of a model belong to which of two revisions: `chat-3` has the index 3.

A slot stays with its revision: what is promoted keeps its slots, and nothing is started anew for that.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """The indices that each revision holds, ascending; no index is in both."""

    stable: tuple[int, ...]
    canary: tuple[int, ...] = ()

    @property
    def spare(self) -> int:
        """Of the replica that stands in while those of the stable revision are replaced."""
        return lowest((*self.stable, *self.canary))


def lowest(taken: Collection[int]) -> int:
    """The lowest index that nobody has."""
    index = 0
    while index in taken:
        index += 1
    return index


def resized(held: Collection[int], several: int, taken: Collection[int] = ()) -> tuple[int, ...]:
    """As many as are wanted: the lowest of those held, and the lowest that are free."""
    found = sorted(held)[:several]
    while len(found) < several:
        found.append(lowest((*found, *taken)))
    return tuple(sorted(found))


def with_stable(held: Held, several: int) -> Held:
    """With so many replicas of the stable revision."""
    return Held(resized(held.stable, several, held.canary), held.canary)


def with_canary(held: Held, several: int) -> Held:
    """With so many replicas of the canary. The slot of the spare stays free, also while nobody stands in."""
    return Held(held.stable, resized(held.canary, several, (*held.stable, held.spare)))
