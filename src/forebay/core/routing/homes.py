"""Where the sessions of a model are: each at the replica where it began, and at another one once that was lost.

Several gateways keep such a memory without asking each other. So nothing in it may hang on which of them had a
request just then: when a replica is lost its sessions move at once, also those that nobody asks for in that time, and
to where a hash says among those that were left.
"""

from collections.abc import Sequence
from typing import Final

from forebay.core.model import ReplicaState
from forebay.core.routing.policies import mix
from forebay.core.routing.values import View

HOMES_MAX: Final = 65_536
"""Of so many sessions a gateway remembers where they are."""
SLOTS_MAX: Final = 1024
LOSSES_MAX: Final = 32
"""Of so many slots it remembers their last losses, so many of each."""


class Homes:
    """Made for one model of one gateway. A slot is a replica's id, whichever start of it."""

    __slots__ = ("_alive", "_homes", "_losses", "_number")

    def __init__(self) -> None:
        self._homes: dict[int, tuple[str, int]] = {}
        """By the sessions' keys the slot, and how many losses there were then; those used last at the end."""
        self._alive: dict[str, View] = {}
        self._losses: dict[str, list[tuple[int, list[tuple[int, str]]]]] = {}
        """By slot: the numbers of its losses, and who was left then, name and slot of each."""
        self._number = 0

    def look(self, replicas: Sequence[View]) -> None:
        """Notice who has been lost. To be done before a session is looked up, and now and then."""
        before = self._alive
        alive = {
            each.id: each
            for each in replicas
            if each.state is ReplicaState.READY or each.state is ReplicaState.DEGRADED
        }
        self._alive = alive
        lost = [slot for slot, replica in before.items() if alive.get(slot) is not replica]
        left = [(each.meter.name, slot) for slot, each in alive.items() if before.get(slot) is each]
        if not lost or not left:  # where all are lost, all come back
            return
        self._number += 1
        for slot in lost:
            losses = self._losses.pop(slot, [])
            self._losses[slot] = [*losses[1 - LOSSES_MAX :], (self._number, left)]
        while len(self._losses) > SLOTS_MAX:
            del self._losses[next(iter(self._losses))]

    def find(self, key: int) -> str:
        """The slot of a session; empty: it has none yet."""
        slot, number = self._homes.get(key, ("", 0))
        while self.lost(slot) > number:  # it has moved, perhaps several times
            number, left = next(loss for loss in self._losses[slot] if loss[0] > number)
            scattered = mix(key)
            slot = max(left, key=lambda each: mix(scattered ^ each[0]))[1]
        return slot

    def settle(self, key: int, slot: str) -> None:
        """A request of the session was sent to that slot: its home, unless it has one that is alive."""
        home = self.find(key)
        self._homes.pop(key, None)
        self._homes[key] = home if home in self._alive else slot, self._number
        if len(self._homes) > HOMES_MAX:
            del self._homes[next(iter(self._homes))]

    def lost(self, slot: str) -> int:
        """The number of the slot's last loss; 0: it has not been lost."""
        losses = self._losses.get(slot)
        return losses[-1][0] if losses else 0
