"""A worker's side of the prefix index: its engine's cached blocks, and their changes since a reader's last
request."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

from forebay.core.model import BlockNews
from forebay.core.prefix.blocks import CHANGES_MAX


class Journal:
    """A cache's blocks and its last changes, numbered. A reader that is too far behind gets the whole content."""

    __slots__ = ("_changes", "_held", "_seq")

    def __init__(self) -> None:
        self._held: dict[int, None] = {}
        self._changes: deque[int] = deque(maxlen=CHANGES_MAX)
        self._seq = 1  # 0 means "never read"

    def apply(self, stored: Iterable[int], removed: Iterable[int]) -> None:
        """Apply a change of the cache. Blocks beyond `CHANGES_MAX` are silently omitted."""
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
        """The cache is empty or was replaced: all readers must start over."""
        self._held.clear()
        self._changes.clear()
        self._seq += 1

    def since(self, seq: int, *, estimated: bool) -> BlockNews:
        """The changes after `seq`, each block once; the whole content if they are no longer known."""
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
    """A model of an engine's prefix cache, in blocks instead of tokens, with LRU eviction."""

    __slots__ = ("_changed", "_sizes", "tokens")

    def __init__(self) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self.tokens = 0
        """Tokens of all cached blocks."""
        self._changed: dict[int, None] = {}

    def use(self, blocks: Sequence[int]) -> int:
        """Prefill of a prompt begins: returns how many tokens of its prefix are cached."""
        sizes = self._sizes
        depth = next((at for at, block in enumerate(blocks) if block not in sizes), len(blocks))
        # so that the end of a prompt is evicted first: it is useless without its start
        for block in reversed(blocks[:depth]):
            sizes.move_to_end(block)
        return sum([sizes[block] for block in blocks[:depth]])

    def store(self, blocks: Sequence[int], tokens: int) -> None:
        """A prompt of `tokens` tokens was prefilled: its blocks are cached, each with an equal share of them."""
        sizes = self._sizes
        for block in reversed(blocks):
            if block in sizes:
                sizes.move_to_end(block)
            else:
                sizes[block] = share = tokens // len(blocks)
                self.tokens += share
                self._changed[block] = None

    def shrink(self, tokens_max: int) -> None:
        """Evict down to `tokens_max` tokens and to as many blocks as a journal keeps."""
        while self._sizes and (self.tokens > tokens_max or len(self._sizes) > CHANGES_MAX):
            block, tokens = self._sizes.popitem(last=False)
            self.tokens -= tokens
            self._changed[block] = None

    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Blocks stored and removed since the last call, each once; None: no change."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        stored = tuple([block for block in changed if block in self._sizes])
        return stored, tuple([block for block in changed if block not in self._sizes])
