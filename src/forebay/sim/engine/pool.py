"""The KV cache of one replica: whose tokens it holds, and which beginnings of prompts are kept for the next one."""

from collections import OrderedDict
from collections.abc import Sequence


class KvPool:
    """Tokens of running requests, and whole blocks of prompts that several may share.

    A block in use is pinned and counted once, however many use it; one that nobody uses stays until room is needed,
    and what was not used for longest goes first. Everything else belongs to one request: the end of a prompt that
    fills no block, and what is generated. It is counted in tokens; an engine's own blocks are small (16 in vLLM).
    """

    __slots__ = ("_changed", "_idle", "_pins", "block_tokens", "own_tokens", "total_tokens")

    def __init__(self, total_tokens: int, block_tokens: int) -> None:
        self.total_tokens = total_tokens
        self.block_tokens = block_tokens
        self.own_tokens = 0
        """In no block that could be shared."""
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._changed: dict[int, None] = {}

    def __contains__(self, block: object) -> bool:
        """Whether a block is there."""
        return block in self._pins or block in self._idle

    def used_tokens(self) -> int:
        """Of all that runs: nothing of it can be evicted."""
        return len(self._pins) * self.block_tokens + self.own_tokens

    def room(self) -> int:
        """Tokens that are free, or would be if all that nobody uses went."""
        return self.total_tokens - len(self._pins) * self.block_tokens - self.own_tokens

    def reach(self, blocks: Sequence[int]) -> tuple[int, int]:
        """How many blocks from the first one on are there, and how many of these are in use."""
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
        """Somebody uses these blocks, which are all there."""
        pins, idle = self._pins, self._idle
        for block in blocks:
            if block in pins:
                pins[block] += 1
            else:
                del idle[block]
                pins[block] = 1

    def share(self, block: int) -> bool:
        """Somebody's own tokens have become this block, which they pin. False if it is there: nothing changes."""
        if block in self._pins or block in self._idle:
            return False
        self._pins[block] = 1
        self.own_tokens -= self.block_tokens
        self._toggle(block)
        return True

    def unpin(self, blocks: Sequence[int]) -> None:
        """Who has pinned these blocks does not use them any more."""
        pins, idle = self._pins, self._idle
        for block in reversed(blocks):  # so the end of a prompt goes first: without its start it is useless
            users = pins[block] - 1
            if users:
                pins[block] = users
            else:
                del pins[block]
                idle[block] = None

    def take(self, tokens: int) -> None:
        """Somebody has so many more tokens of their own, for which there is room."""
        self.own_tokens += tokens
        idle = self._idle
        over = self.own_tokens + (len(self._pins) + len(idle)) * self.block_tokens - self.total_tokens
        while over > 0:
            block, _ = idle.popitem(last=False)
            self._toggle(block)
            over -= self.block_tokens

    def news(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """What was stored and what removed since the last call, each block once; None: nothing."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        pins, idle = self._pins, self._idle
        stored = tuple([block for block in changed if block in pins or block in idle])
        return stored, tuple([block for block in changed if block not in pins and block not in idle])

    def _toggle(self, block: int) -> None:
        """There or gone again, as whoever asked last believes it: so no more is noted than they hold and we hold."""
        if block in self._changed:
            del self._changed[block]
        else:
            self._changed[block] = None
