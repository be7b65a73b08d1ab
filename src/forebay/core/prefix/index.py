"""Which replicas have which prompt prefixes cached, as reported by them or predicted by this gateway.

A replica that reports its prefix cache is believed: reported blocks stay until it says otherwise, and what was sent
there since is predicted to be cached for a few seconds, until the report confirms it. For a replica that reports
nothing, everything sent there is predicted to be cached, and evicted like in a cache.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from forebay.core.prefix.blocks import CHANGES_MAX

BLOCKS_MAX: Final = 8192
"""Assumed for a replica that does not report its cache size: a million tokens in blocks of 128."""
PAIRS_MAX: Final = 1 << 18
"""Most blocks of all replicas together."""
SWEEP_BLOCKS: Final = 256
"""Blocks of a removed replica that are deleted per step, so that no request waits for all of them."""
GUESS_S: Final = 5.0
"""Within this time a prompt should have been prefilled and reported; predictions that are older and unconfirmed are
dropped."""


class Source(StrEnum):
    """How it is known that a replica has a prefix cached."""

    EXACT = "exact"
    """Reported by the replica from its engine's cache."""
    ESTIMATED = "estimated"
    """Reported by the replica, inferred from all requests it received."""
    PREDICTED = "predicted"
    """Predicted by this gateway, which sent such a prompt there."""


class _Guess:
    """A block that was sent to a replica, linked in the order of sending."""

    __slots__ = ("block", "newer", "older", "since")

    def __init__(self, block: int, since: float) -> None:
        self.block = block
        self.since = since
        self.older = self.newer = self

    def unlink(self) -> None:
        """Remove it from the linked list."""
        self.older.newer, self.newer.older = self.newer, self.older


class _Share:
    """One replica's blocks; none is both reported (`told`) and predicted (`guessed`).

    Predictions form a ring in the order of their last renewal. Each request renews all blocks that its prompt shares
    with earlier ones; an OrderedDict would take five look-ups per block where this takes one.
    """

    __slots__ = ("_ends", "guessed", "mask", "size", "tells", "told")

    def __init__(self, mask: int, size: int) -> None:
        self.mask = mask
        self.size = size
        self.tells = False
        self.told: dict[int, None] = {}
        self.guessed: dict[int, _Guess] = {}
        self._ends = _Guess(0, 0.0)
        """Sentinel between the newest and the oldest prediction."""

    def __len__(self) -> int:
        return len(self.told) + len(self.guessed)

    def guess(self, block: int, now: float) -> bool:
        """Predict that it holds the block. Returns whether that is new."""
        guess = self.guessed.get(block)
        known = guess is not None
        if guess is None:
            guess = self.guessed[block] = _Guess(block, now)
        else:
            guess.unlink()
            guess.since = now
        ends = self._ends
        newest = ends.older
        guess.older, guess.newer = newest, ends
        newest.newer = ends.older = guess
        return not known

    def drop(self, block: int) -> bool:
        """Drop the prediction of a block. Returns whether there was one."""
        guess = self.guessed.pop(block, None)
        if guess is None:
            return False
        guess.unlink()
        return True

    def oldest(self, count: int) -> list[int]:
        """Up to `count` blocks of the oldest predictions, oldest first."""
        blocks = []
        guess = self._ends.newer
        for _ in range(min(count, len(self.guessed))):
            blocks.append(guess.block)
            guess = guess.newer
        return blocks

    def stale(self, now: float) -> int:
        """How many predictions are so old that they should have been confirmed by now."""
        count, guess = 0, self._ends.newer
        while count < len(self.guessed) and now - guess.since >= GUESS_S:
            count += 1
            guess = guess.newer
        return count


class PrefixIndex:
    """Block hash → bit set of replicas, so that one walk over a prompt's blocks answers for all of them.

    Hashes are chained: a block stands for its whole prefix. The bit of a removed replica is masked out of every walk
    at once and reused when its blocks are deleted. `now` is in seconds and monotonic.
    """

    __slots__ = ("_leaving", "_owners", "_pairs", "_shares", "pairs_max")

    def __init__(self, pairs_max: int = PAIRS_MAX) -> None:
        self.pairs_max = pairs_max
        self._owners: dict[int, int] = {}
        self._shares: dict[int, _Share] = {}
        self._leaving: list[tuple[int, list[int]]] = []
        self._pairs = 0

    def __len__(self) -> int:
        return self._pairs

    def join(self, blocks_max: int = 0) -> int:
        """Add a replica and return its mask, a single bit; `blocks_max` is its cache size, 0 if unknown."""
        taken = 0
        for mask in (*self._shares, *(mask for mask, _ in self._leaving)):
            taken |= mask
        mask = ~taken & (taken + 1)
        self._shares[mask] = _Share(mask, blocks_max or BLOCKS_MAX)
        return mask

    def resize(self, mask: int, blocks_max: int) -> None:
        """Set how many blocks the replica's cache can hold; 0 if unknown."""
        self._shares[mask].size = blocks_max or BLOCKS_MAX

    def leave(self, mask: int) -> None:
        """Remove a replica that has stopped or is to be added anew. Its mask is no longer its own."""
        share = self._shares.pop(mask)
        if len(share):
            guessed = share.oldest(len(share.guessed))
            self._leaving.append((mask, [*share.told, *guessed]))
            for block in guessed:  # break the ring: the cyclic garbage collector runs rarely
                share.drop(block)

    def note(self, mask: int, blocks: tuple[int, ...], now: float) -> None:
        """A prompt was sent to the replica, which will cache it."""
        share, owners = self._shares[mask], self._owners
        told = share.told
        # so that the end of a prompt is evicted first: it is useless without its start
        for block in reversed(blocks):
            if told and block in told:
                continue
            if share.guess(block, now):
                owners[block] = owners.get(block, 0) | mask
                self._pairs += 1
        if share.tells:
            self._trim(share, share.stale(now))
        if len(share.guessed) > share.size:
            self._trim(share, len(share.guessed) - share.size)
        if self._leaving or self._pairs > self.pairs_max:
            self._settle(len(blocks))

    def tell(self, mask: int, stored: Sequence[int], removed: Iterable[int], now: float, *, reset: bool) -> None:
        """Apply a replica's report of its prefix cache: the changes, or with `reset` its whole content (`stored`).

        Removed blocks also cancel predictions. Of the reported blocks, at most `CHANGES_MAX` are kept.
        """
        share = self._shares[mask]
        share.tells = True
        told, owners = share.told, self._owners
        if reset:
            self._trim(share, len(share.guessed))
            removed = told.keys() - set(stored)
        gone = []
        for block in removed:
            if block in told:
                del told[block]
                gone.append(block)
            elif share.drop(block):
                gone.append(block)
        self._clear(mask, gone)
        for block in stored:
            if block in told or len(told) >= CHANGES_MAX:
                continue
            if not share.drop(block):
                owners[block] = owners.get(block, 0) | mask
                self._pairs += 1
            told[block] = None
        self._trim(share, share.stale(now))
        self._settle(len(stored))

    def told(self, mask: int, block: int) -> bool:
        """Whether the replica has reported the block."""
        return block in self._shares[mask].told

    def depths(self, blocks: tuple[int, ...], masks: list[int]) -> list[int]:
        """Length of the cached prefix at each of these replicas, in blocks."""
        owners = self._owners
        holders = 0
        for mask in masks:
            holders |= mask
        depths = [0] * len(masks)
        depth = 0
        for block in blocks:
            left = holders & owners.get(block, 0)
            if left != holders:
                lost = holders ^ left
                for n, mask in enumerate(masks):
                    if mask & lost:
                        depths[n] = depth
                holders = left
                if not left:
                    break
            depth += 1
        for n, mask in enumerate(masks):
            if mask & holders:
                depths[n] = depth
        return depths

    def _trim(self, share: _Share, count: int) -> None:
        """Drop the oldest predictions."""
        blocks = share.oldest(count)
        for block in blocks:
            share.drop(block)
        self._clear(share.mask, blocks)

    def _settle(self, added: int) -> None:
        """Continue deleting and evict if needed, after at most `added` blocks were inserted."""
        if self._leaving:
            mask, blocks = self._leaving[-1]
            count = SWEEP_BLOCKS + added
            self._clear(mask, blocks[-count:])
            del blocks[-count:]
            if not blocks:
                self._leaving.pop()
        excess = self._pairs - self.pairs_max
        if excess > 0:  # the excess is at most what was just inserted, so one replica has enough to evict
            fattest = max(self._shares.values(), key=len)
            more = max(0, excess - len(fattest.guessed))
            self._trim(fattest, excess)
            oldest = list(fattest.told)[:more]
            for block in oldest:
                del fattest.told[block]
            self._clear(fattest.mask, oldest)

    def _clear(self, mask: int, blocks: Sequence[int]) -> None:
        owners = self._owners
        for block in blocks:
            rest = owners[block] & ~mask
            if rest:
                owners[block] = rest
            else:
                del owners[block]
        self._pairs -= len(blocks)
