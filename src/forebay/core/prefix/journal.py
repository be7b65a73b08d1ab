"""A worker's side of the prefix index: what its engine's cache holds, and what has changed since somebody asked."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

from forebay.core.model import BlockNews
from forebay.core.prefix.blocks import CHANGES_MAX


class Journal:
    """Blocks held by a cache, and the last changes, numbered. Who asks for changes too old to be known gets all."""

    __slots__ = ("_changes", "_held", "_seq")

    def __init__(self) -> None:
        self._held: dict[int, None] = {}
        self._changes: deque[int] = deque(maxlen=CHANGES_MAX)
        self._seq = 1  # nobody has seen 0

    def apply(self, stored: Iterable[int], removed: Iterable[int]) -> None:
        """The cache has changed. What it holds beyond `CHANGES_MAX` is passed over in silence."""
        held = self._held
        for block in removed:
            if block in held:
                del held[block]
                self._note(block)
        for block in stored:
            if block not in held and len(held) < CHANGES_MAX:
                held[block] = None
                self._note(block)

    def clear(self) -> None:
        """The cache is empty, or another one: nobody's knowledge is worth anything."""
        self._held.clear()
        self._changes.clear()
        self._seq += 1

    def since(self, seq: int, *, estimated: bool) -> BlockNews:
        """What has changed after change `seq`, each block once; all that is held if that is not known any more."""
        held, changes = self._held, self._changes
        behind = self._seq - seq
        if seq <= 0 or not 0 <= behind <= len(changes):
            return BlockNews(self._seq, True, estimated, tuple(held))
        changed = dict.fromkeys(islice(reversed(changes), behind))
        stored = tuple([block for block in changed if block in held])
        removed = tuple([block for block in changed if block not in held])
        return BlockNews(self._seq, False, estimated, stored, removed)

    def _note(self, block: int) -> None:
        self._changes.append(block)
        self._seq += 1


class BlockCache:
    """A prefix cache as engines have them, in blocks instead of tokens: what was not used for longest goes first."""

    __slots__ = ("_changed", "_sizes", "tokens")

    def __init__(self) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self.tokens = 0
        """Of all that is held."""
        self._changed: dict[int, None] = {}

    def use(self, blocks: Sequence[int]) -> int:
        """A prompt begins to be read: how many tokens of it are held, from the first on."""
        sizes = self._sizes
        depth = next((at for at, block in enumerate(blocks) if block not in sizes), len(blocks))
        for block in reversed(blocks[:depth]):  # so the end of a prompt goes first: without its start it is useless
            sizes.move_to_end(block)
        return sum([sizes[block] for block in blocks[:depth]])

    def store(self, blocks: Sequence[int], tokens: int) -> None:
        """A prompt of so many tokens has been read: its blocks are held, each with an equal share of them."""
        sizes = self._sizes
        for block in reversed(blocks):
            if block in sizes:
                sizes.move_to_end(block)
            else:
                sizes[block] = share = tokens // len(blocks)
                self.tokens += share
                self._changed[block] = None

    def shrink(self, tokens_max: int) -> None:
        """Hold no more than so many tokens, and no more blocks than a journal does."""
        while self._sizes and (self.tokens > tokens_max or len(self._sizes) > CHANGES_MAX):
            block, tokens = self._sizes.popitem(last=False)
            self.tokens -= tokens
            self._changed[block] = None

    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """What was stored and what removed since the last call, each block once; None: nothing."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        stored = tuple([block for block in changed if block in self._sizes])
        return stored, tuple([block for block in changed if block not in self._sizes])
