"""Which replicas hold which beginnings of prompts: what this gateway has sent where, forgotten as caches forget."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

BLOCKS_MAX: Final = 8192
"""Of a replica that does not say how much it can cache: a million tokens in blocks of 128."""
PAIRS_MAX: Final = 1 << 18
"""Blocks of all replicas together."""
SWEEP_BLOCKS: Final = 256
"""How many blocks of a replica that has gone are forgotten at a time, so that no request waits for all of them."""


class PrefixIndex:
    """Block hash → replicas, one bit each, so that one walk over a prompt's blocks answers for all of them.

    Hashes are chained: a block stands for all before it too. A replica's blocks are kept in the order of their last
    use. A bit whose replica has left is out of every walk at once and used anew when its blocks are forgotten.
    """

    __slots__ = ("_held", "_leaving", "_owners", "_pairs", "_sizes", "pairs_max")

    def __init__(self, pairs_max: int = PAIRS_MAX) -> None:
        self.pairs_max = pairs_max
        self._owners: dict[int, int] = {}
        self._held: dict[int, OrderedDict[int, None]] = {}
        self._sizes: dict[int, int] = {}
        self._leaving: list[tuple[int, OrderedDict[int, None]]] = []
        self._pairs = 0

    def __len__(self) -> int:
        return self._pairs

    def join(self, blocks_max: int = 0) -> int:
        """A mask with one bit, the new replica's own; `blocks_max` is what its cache can hold, 0 if unknown."""
        taken = 0
        for mask in (*self._held, *(mask for mask, _ in self._leaving)):
            taken |= mask
        mask = ~taken & (taken + 1)
        self._held[mask] = OrderedDict()
        self._sizes[mask] = blocks_max or BLOCKS_MAX
        return mask

    def resize(self, mask: int, blocks_max: int) -> None:
        """The replica says how many blocks its cache can hold; 0 if it does not."""
        self._sizes[mask] = blocks_max or BLOCKS_MAX

    def leave(self, mask: int) -> None:
        """The replica has stopped, or has cleared its cache and joins anew. Its mask is not its own any more."""
        del self._sizes[mask]
        held = self._held.pop(mask)
        if held:
            self._leaving.append((mask, held))

    def note(self, mask: int, blocks: Sequence[int]) -> None:
        """A prompt was sent to the replica, which will hold it."""
        held = self._held[mask]
        owners = self._owners
        before = len(held)
        for block in reversed(blocks):  # so the end of a prompt is forgotten first: without its start it is useless
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                owners[block] = owners.get(block, 0) | mask
        self._pairs += len(held) - before
        self._forget(mask, held, len(held) - self._sizes[mask])
        if self._leaving:
            self._sweep(SWEEP_BLOCKS + len(blocks))
        if self._pairs > self.pairs_max:  # by no more than was put in now, so one replica holds enough to make room
            fattest = max(self._held, key=lambda mask: len(self._held[mask]))
            self._forget(fattest, self._held[fattest], self._pairs - self.pairs_max)

    def depths(self, blocks: Sequence[int], masks: Sequence[int]) -> list[int]:
        """How many blocks from the first on each of these replicas holds."""
        owners = self._owners.get
        holders = 0
        for mask in masks:
            holders |= mask
        ends: dict[int, int] = {}
        depth = 0
        for block in blocks:
            left = holders & owners(block, 0)
            if left != holders:
                lost = holders ^ left
                while lost:
                    mask = lost & -lost
                    ends[mask] = depth
                    lost ^= mask
                if not left:
                    break
                holders = left
            depth += 1
        return [ends.get(mask, depth) for mask in masks]

    def _forget(self, mask: int, held: OrderedDict[int, None], count: int) -> None:
        owners = self._owners
        for _ in range(min(count, len(held))):
            block, _none = held.popitem(last=False)
            rest = owners[block] & ~mask
            if rest:
                owners[block] = rest
            else:
                del owners[block]
            self._pairs -= 1

    def _sweep(self, count: int) -> None:
        mask, held = self._leaving[-1]
        self._forget(mask, held, count)
        if not held:
            self._leaving.pop()
