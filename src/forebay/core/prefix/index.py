"""Which replicas hold which beginnings of prompts, as they say themselves or as this gateway must believe.

A replica that reports its prefix cache is believed: what it names is held until it says otherwise. What was sent
there since is expected, for a few seconds, until the report confirms it. Of a replica that reports nothing, all that
was sent there is taken for held, and forgotten as caches forget.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from forebay.core.prefix.blocks import CHANGES_MAX

BLOCKS_MAX: Final = 8192
"""Of a replica that does not say how much it can cache: a million tokens in blocks of 128."""
PAIRS_MAX: Final = 1 << 18
"""Blocks of all replicas together."""
SWEEP_BLOCKS: Final = 256
"""How many blocks of a replica that has gone are forgotten at a time, so that no request waits for all of them."""
GUESS_S: Final = 5.0
"""Within this a prompt that was sent should have been read and reported; what was not, is not there."""


class Source(StrEnum):
    """How it is known that a replica holds a part of a prompt."""

    EXACT = "exact"
    """By the replica's word, whose engine knows."""
    ESTIMATED = "estimated"
    """By the replica's word, which is inferred from all that was sent there."""
    PREDICTED = "predicted"
    """This gateway has sent such a prompt there."""


class _Guess:
    """A block that a replica should hold since it was sent there, between those that were sent before and after."""

    __slots__ = ("block", "newer", "older", "since")

    def __init__(self, block: int, since: float) -> None:
        self.block = block
        self.since = since
        self.older = self.newer = self

    def unlink(self) -> None:
        """Take it from between its neighbours."""
        self.older.newer, self.newer.older = self.newer, self.older


class _Share:
    """What one replica holds: no block is both told and guessed.

    Guesses are a ring in the order in which they were made last. Each request renews all that its prompt shares with
    others before it, and for every block an OrderedDict would take five look-ups where this takes one.
    """

    __slots__ = ("_ends", "guessed", "mask", "size", "tells", "told")

    def __init__(self, mask: int, size: int) -> None:
        self.mask = mask
        self.size = size
        self.tells = False
        self.told: dict[int, None] = {}
        self.guessed: dict[int, _Guess] = {}
        self._ends = _Guess(0, 0.0)
        """Between the newest guess and the oldest."""

    def __len__(self) -> int:
        return len(self.told) + len(self.guessed)

    def guess(self, block: int, now: float) -> bool:
        """It should hold the block from now on. Returns whether that is new."""
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
        """Guess no more that it holds the block. Returns whether that was guessed."""
        guess = self.guessed.pop(block, None)
        if guess is None:
            return False
        guess.unlink()
        return True

    def oldest(self, count: int) -> list[int]:
        """The blocks of the oldest guesses, so many or all, the oldest first."""
        blocks = []
        guess = self._ends.newer
        for _ in range(min(count, len(self.guessed))):
            blocks.append(guess.block)
            guess = guess.newer
        return blocks

    def stale(self, now: float) -> int:
        """How many guesses are so old that they should have been reported by now."""
        count, guess = 0, self._ends.newer
        while count < len(self.guessed) and now - guess.since >= GUESS_S:
            count += 1
            guess = guess.newer
        return count


class PrefixIndex:
    """Block hash → replicas, one bit each, so that one walk over a prompt's blocks answers for all of them.

    Hashes are chained: a block stands for all before it too. A bit whose replica has left is out of every walk at
    once and used anew when its blocks are forgotten. `now` is in seconds and never goes back.
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
        """A mask with one bit, the new replica's own; `blocks_max` is what its cache can hold, 0 if unknown."""
        taken = 0
        for mask in (*self._shares, *(mask for mask, _ in self._leaving)):
            taken |= mask
        mask = ~taken & (taken + 1)
        self._shares[mask] = _Share(mask, blocks_max or BLOCKS_MAX)
        return mask

    def resize(self, mask: int, blocks_max: int) -> None:
        """The replica says how many blocks its cache can hold; 0 if it does not."""
        self._shares[mask].size = blocks_max or BLOCKS_MAX

    def leave(self, mask: int) -> None:
        """The replica has stopped, or is believed no more and joins anew. Its mask is not its own any more."""
        share = self._shares.pop(mask)
        if len(share):
            guessed = share.oldest(len(share.guessed))
            self._leaving.append((mask, [*share.told, *guessed]))
            for block in guessed:  # a ring would wait for a collector that runs rarely
                share.drop(block)

    def note(self, mask: int, blocks: tuple[int, ...], now: float) -> None:
        """A prompt was sent to the replica, which will hold it."""
        share, owners = self._shares[mask], self._owners
        told = share.told
        for block in reversed(blocks):  # so the end of a prompt is forgotten first: without its start it is useless
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
        """The replica reports its prefix cache: what has changed, or with `reset` all of it (`stored`).

        What it says it has removed is not believed any more, whatever was sent there. It may name as many blocks as
        it likes: no more than `CHANGES_MAX` are kept.
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
        """Whether the replica itself says that it holds a block."""
        return block in self._shares[mask].told

    def depths(self, blocks: tuple[int, ...], masks: list[int]) -> list[int]:
        """How many blocks from the first on each of these replicas holds."""
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
        """Forget the oldest guesses."""
        blocks = share.oldest(count)
        for block in blocks:
            share.drop(block)
        self._clear(share.mask, blocks)

    def _settle(self, added: int) -> None:
        """Make room again where `added` blocks at most have come in."""
        if self._leaving:
            mask, blocks = self._leaving[-1]
            count = SWEEP_BLOCKS + added
            self._clear(mask, blocks[-count:])
            del blocks[-count:]
            if not blocks:
                self._leaving.pop()
        excess = self._pairs - self.pairs_max
        if excess > 0:  # by no more than was put in now, so one replica holds enough to make room
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
