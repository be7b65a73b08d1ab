"""The KV cache of one replica: tokens of running requests and cached prefixes."""

from collections import OrderedDict
from collections.abc import Sequence


class KvPool:
    """Tokens of running requests, and whole prompt blocks that several requests may share.

    A used block is pinned and counted once, however many requests use it; an unused one stays until room is needed
    (LRU). Everything else belongs to one request: the partial last block of a prompt, and generated tokens. These are
    counted in tokens, as an engine's own blocks are small (16 in vLLM).
    """

    __slots__ = ("_changed", "_idle", "_pins", "block_tokens", "own_tokens", "total_tokens")

    def __init__(self, total_tokens: int, block_tokens: int) -> None:
        self.total_tokens = total_tokens
        self.block_tokens = block_tokens
        self.own_tokens = 0
        """Tokens that are in no shareable block."""
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._changed: dict[int, None] = {}

    def __contains__(self, block: object) -> bool:
        """Whether a block is cached."""
        return block in self._pins or block in self._idle

    def used_tokens(self) -> int:
        """Tokens of running requests, which cannot be evicted."""
        return len(self._pins) * self.block_tokens + self.own_tokens

    def room(self) -> int:
        """Tokens that are free or evictable."""
        return self.total_tokens - len(self._pins) * self.block_tokens - self.own_tokens

    def reach(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Length of the cached prefix in blocks, and how many of these are in use."""
        pins, idle = self._pins, self._idle
        depth = pinned = 0
        for block in blocks:
            if block in pins:
                pinned += 1
            elif block not in idle:
                break
            depth += 1
        return depth, pinned

    def pin(self, blocks: Sequence[int]) -> None:
        """Pin blocks, which must be cached."""
        pins, idle = self._pins, self._idle
        for block in blocks:
            if block in pins:
                pins[block] += 1
            else:
                del idle[block]
                pins[block] = 1

    def share(self, block: int) -> bool:
        """Turn a request's own tokens into this block, pinned by it. False, without effect, if it is already
        cached."""
        if block in self._pins or block in self._idle:
            return False
        self._pins[block] = 1
        self.own_tokens -= self.block_tokens
        self._toggle(block)
        return True

    def unpin(self, blocks: Sequence[int]) -> None:
        """Unpin blocks."""
        pins, idle = self._pins, self._idle
        # so that the end of a prompt is evicted first: it is useless without its start
        for block in reversed(blocks):
            users = pins[block] - 1
            if users:
                pins[block] = users
            else:
                del pins[block]
                idle[block] = None

    def take(self, tokens: int) -> None:
        """Allocate tokens to a request, for which there must be room."""
        self.own_tokens += tokens
        idle = self._idle
        over = self.own_tokens + (len(self._pins) + len(idle)) * self.block_tokens - self.total_tokens
        while over > 0:
            block, _ = idle.popitem(last=False)
            self._toggle(block)
            over -= self.block_tokens

    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Blocks stored and removed since the last call, each once; None: no change."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        pins, idle = self._pins, self._idle
        stored = tuple([block for block in changed if block in pins or block in idle])
        return stored, tuple([block for block in changed if block not in pins and block not in idle])

    def _toggle(self, block: int) -> None:
        """Toggle a block's pending change relative to what was last reported, so that the record stays bounded."""
        if block in self._changed:
            del self._changed[block]
        else:
            self._changed[block] = None
