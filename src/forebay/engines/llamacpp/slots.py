"""Tracks which sequence runs in which slot of a llama.cpp server, and what remains in its KV cache.

The server reports the slot only at the end of an answer. So the slot is chosen here, by the server's own rule: the
idle one with the longest common prompt prefix, or else the least recently used.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from forebay.engines.protocol import Cached

SHARED_TOKENS_MIN: Final = 64
"""Shorter common prefixes are not reused: processing them again is cheap, and their answers repeat. A partly cached
prompt is summed in another order, which can flip a token that was nearly a tie.
"""


class Occupant(Protocol):
    """A sequence, as far as slots are concerned."""

    slot: int
    ids: Sequence[int]
    """Processed token ids: the prompt, and text from another replica."""
    blocks: tuple[int, ...]

    @property
    def cells(self) -> int:
        """KV cells in use, one per token."""


class Slots:
    """Slots by number; each keeps its last prompt until it is reused or its cells are needed."""

    def __init__(self, count: int) -> None:
        self._order = dict.fromkeys(range(count))  # least recently used first
        self._busy: set[int] = set()
        self._held: dict[int, Occupant] = {}
        self._told: dict[int, None] = {}
        self._changed = False

    def take(self, ids: Sequence[int]) -> int:
        """Choose and occupy a slot; at least one must be idle."""
        held = self._held
        slot = max(
            (slot for slot in self._order if slot not in self._busy),
            key=lambda slot: _shared(ids, held[slot].ids) if slot in held else 0,
        )
        self._busy.add(slot)
        return slot

    def fill(self, sequence: Occupant) -> None:
        """The sequence's prompt has been processed."""
        self._held[sequence.slot] = sequence
        self._changed = True

    def free(self, sequence: Occupant) -> None:
        """The sequence has ended. If its prompt was not complete, the slot's contents are unknown."""
        slot = sequence.slot
        self._busy.discard(slot)
        self._order[slot] = self._order.pop(slot)
        if self._held.get(slot) is not sequence and self._held.pop(slot, None) is not None:
            self._changed = True

    def purge(self, cells_max: int) -> None:
        """Limit cells of idle slots to `cells_max`: the server empties idle slots in order of their number."""
        idle = {slot: each for slot, each in sorted(self._held.items()) if slot not in self._busy}
        cells = sum(each.cells for each in idle.values())
        for slot, each in idle.items():
            if cells > cells_max:
                cells -= each.cells
                del self._held[slot]
                self._changed = True

    def news(self) -> Cached | None:
        """Cache changes since the last call."""
        if not self._changed:
            return None
        self._changed, before = False, self._told
        self._told = now = dict.fromkeys(block for each in self._held.values() for block in each.blocks)
        return Cached(tuple([b for b in now if b not in before]), tuple([b for b in before if b not in now]))


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix; 0 if it is too short to be reused."""
    unlike = (at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)
    shared = next(unlike, min(len(ids), len(others)))
    return shared if shared >= SHARED_TOKENS_MIN else 0
