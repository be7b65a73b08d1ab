"""Session affinity: each session stays at the replica where it began, and moves if that one is lost.

Several gateways keep such a table without coordination, so its content must not depend on which of them happened to
receive a request. When a replica is lost, all its sessions move at once, including idle ones, to a replica chosen by
rendezvous hashing among those that remained.
"""

from collections.abc import Sequence
from typing import Final

from forebay.core.model import ReplicaState
from forebay.core.routing.policies import mix
from forebay.core.routing.values import ReplicaView

HOMES_MAX: Final = 65_536
"""Most sessions that a gateway remembers."""
SLOTS_MAX: Final = 1024
"""Most slots whose losses are remembered."""
LOSSES_MAX: Final = 32
"""Most losses remembered per slot."""


class SessionHomes:
    """The sessions of one model at one gateway. A slot is a replica's id, regardless of its generation."""

    __slots__ = ("_alive", "_homes", "_losses", "_number")

    def __init__(self) -> None:
        self._homes: dict[int, tuple[str, int]] = {}
        """By session key: the slot, and the number of losses at that time; least recently used first."""
        self._alive: dict[str, ReplicaView] = {}
        """By slot, as of the last `detect_losses`."""
        self._losses: dict[str, list[tuple[int, list[tuple[int, str]]]]] = {}
        """By slot: its losses, each with its number and the slots that remained (name hash and id)."""
        self._number = 0
        """The number of the last loss."""

    def detect_losses(self, replicas: Sequence[ReplicaView]) -> None:
        """Detect lost replicas. To be called before a session is looked up, and periodically."""
        before = self._alive
        alive = {
            each.id: each
            for each in replicas
            if each.state is ReplicaState.READY or each.state is ReplicaState.DEGRADED
        }
        self._alive = alive
        lost = [slot for slot, replica in before.items() if alive.get(slot) is not replica]
        left = [(each.meter.name, slot) for slot, each in alive.items() if before.get(slot) is each]
        if not lost or not left:  # if all are lost, sessions stay where they were until they return
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
        while self.lost(slot) > number:  # the session has moved, perhaps several times
            number, left = next(loss for loss in self._losses[slot] if loss[0] > number)
            scattered = mix(key)
            slot = max(left, key=lambda each: mix(scattered ^ each[0]))[1]
        return slot

    def settle(self, key: int, slot: str) -> None:
        """A request of the session was sent to `slot`, which becomes its home unless it has one that is alive."""
        home = self.find(key)
        self._homes.pop(key, None)
        self._homes[key] = home if home in self._alive else slot, self._number
        if len(self._homes) > HOMES_MAX:
            del self._homes[next(iter(self._homes))]

    def lost(self, slot: str) -> int:
        """The number of the slot's last loss; 0: it was never lost."""
        losses = self._losses.get(slot)
        return losses[-1][0] if losses else 0
