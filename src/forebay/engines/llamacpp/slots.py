"""What runs in which slot of a llama.cpp server, and what is left there in its KV cache.

The server says only with the end of an answer where it ran. So the slot is chosen here, by the server's own rule: the
idle one whose prompt begins most alike, or else the one that was used longest ago.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from forebay.engines.protocol import Cached

SHARED_TOKENS_MIN: Final = 64
"""Shorter prompts are always read anew: it costs next to nothing, and their answers repeat. A prompt partly from the
cache is summed in another order, which can turn a token that was nearly a tie."""


class Occupant(Protocol):
    """A sequence, as far as its slot cares."""

    slot: int
    ids: Sequence[int]
    """What is read: the prompt, and what another replica has said."""
    blocks: tuple[int, ...]

    @property
    def cells(self) -> int:
        """KV cells in use, one for each token."""


class Slots:
    """Slots by their numbers; each keeps its last prompt until another one runs there or its cells are needed."""

    def __init__(self, count: int) -> None:
        self._order = dict.fromkeys(range(count))  # used longest ago first
        self._busy: set[int] = set()
        self._held: dict[int, Occupant] = {}
        self._told: dict[int, None] = {}
        self._changed = False

    def take(self, ids: Sequence[int]) -> int:
        """The slot where this runs from now on; there has to be an idle one."""
        held = self._held
        slot = max(
            (slot for slot in self._order if slot not in self._busy),
            key=lambda slot: _shared(ids, held[slot].ids) if slot in held else 0,
        )
        self._busy.add(slot)
        return slot

    def fill(self, sequence: Occupant) -> None:
        """What it reads has been read."""
        self._held[sequence.slot] = sequence
        self._changed = True

    def free(self, sequence: Occupant) -> None:
        """It runs no more. If it was still being read, nobody knows what its slot holds."""
        slot = sequence.slot
        self._busy.discard(slot)
        self._order[slot] = self._order.pop(slot)
        if self._held.get(slot) is not sequence and self._held.pop(slot, None) is not None:
            self._changed = True

    def purge(self, cells_max: int) -> None:
        """Where nothing runs, so many cells may be in use: the server empties such slots, the first one first."""
        idle = {slot: each for slot, each in sorted(self._held.items()) if slot not in self._busy}
        cells = sum(each.cells for each in idle.values())
        for slot, each in idle.items():
            if cells > cells_max:
                cells -= each.cells
                del self._held[slot]
                self._changed = True

    def news(self) -> Cached | None:
        """What has changed since the last call."""
        if not self._changed:
            return None
        self._changed, before = False, self._told
        self._told = now = dict.fromkeys(block for each in self._held.values() for block in each.blocks)
        return Cached(tuple([b for b in now if b not in before]), tuple([b for b in before if b not in now]))


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with; too few to be taken from the cache count as none."""
    unlike = (at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)
    shared = next(unlike, min(len(ids), len(others)))
    return shared if shared >= SHARED_TOKENS_MIN else 0
