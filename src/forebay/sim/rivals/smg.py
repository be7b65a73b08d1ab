"""`cache_aware` of SGLang's model gateway, now Shepherd Model Gateway (SMG): switches between affinity and load.

While loads are uneven, the least loaded replica gets the request. While they are even, the replica that the router's
own tree of past prompts names, if enough of the prompt matches, else the least loaded.
"""

from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from forebay.sim.rivals.history import Lately
from forebay.sim.rivals.values import Rival, RoutedRequest, State, held, hit_tokens, live

CHARS: Final = 4
"""Characters per token: SMG measures its trees in characters."""


class Switch(NamedTuple):
    """Settings of `cache_aware`, with the defaults of SMG's command line."""

    cache_threshold: float = 0.3
    """Share of the prompt that must match."""
    balance_abs: int = 64
    balance_rel: float = 1.5
    """Loads are uneven if max - min exceeds the first value, and max exceeds the second times min."""
    kv_spread: float = 1.0
    """Also uneven if KV shares differ by more; 1: never."""
    kv_overload: float = 1.0
    """Or if a KV share is above this."""
    eviction_s: float = 120.0
    tree_tokens: int = 2**26 // CHARS
    """A replica's tokens in the tree beyond this are removed at each eviction."""
    events: bool = False
    """Use the index of engine events instead of the tree: the replica with the most matching blocks, however few."""


class CacheAware(Rival):
    """One tree for all: a node belongs to every replica that got a prompt through it; a match leads to the first.

    If that one is gone, the request goes to the first live replica and is not recorded.
    """

    __slots__ = ("_chosen", "_evict_at", "_first", "_stray", "_switch", "_tree")

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._tree = Lately()
        self._first: dict[int, int] = {}
        self._chosen: dict[str, int] = {}
        self._evict_at = switch.eviction_s
        self._stray = -1

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        if now >= self._evict_at:
            self._evict(request.block_tokens, replicas, now)
        alive = live(replicas)
        chosen = self._chosen
        least = min(alive, key=lambda at: (replicas[at].in_flight, chosen.get(replicas[at].id, 0)))
        if self._uneven(replicas, alive):
            return least
        if self._switch.events:
            depths = [held(request.blocks, replicas[at].cached) for at in alive]
            longest = max(depths)
            best = [at for at, depth in zip(alive, depths, strict=True) if depth == longest]
            return min(best, key=lambda at: replicas[at].in_flight) if longest else least
        depth, bit = self._match(request.blocks)
        if hit_tokens(request, depth) / request.tokens <= self._switch.cache_threshold:
            return least
        for at in alive:
            if self._tree.bit(replicas[at].id) == bit:
                return at
        self._stray = request.id
        return alive[0]

    def sent(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        self._chosen[replica.id] = self._chosen.get(replica.id, 0) + 1
        if self._switch.events or request.id == self._stray:
            return
        bit, owners, first = self._tree.bit(replica.id), self._tree.owners, self._first
        for block in request.blocks:
            if block not in owners:
                first[block] = bit
        self._tree.add(replica.id, reversed(request.blocks))  # leaves are evicted before their parents

    def _uneven(self, replicas: Sequence[State], alive: Sequence[int]) -> bool:
        switch = self._switch
        loads = [replicas[at].in_flight for at in alive]
        low, high = min(loads), max(loads)
        if high - low > switch.balance_abs and high > switch.balance_rel * low:
            return True
        shares = [replicas[at].report.kv_share for at in alive]
        return max(shares) > switch.kv_overload or max(shares) - min(shares) > switch.kv_spread

    def _match(self, blocks: Sequence[int]) -> tuple[int, int]:
        """The length of the match, and the bit of the matching replica."""
        owners = self._tree.owners
        depth = held(blocks, owners)
        if not depth:
            return 0, 0
        last = blocks[depth - 1]
        mask = owners[last]
        if not self._first[last] & mask:
            self._first[last] = mask & -mask
        return depth, self._first[last]

    def _evict(self, block_tokens: int, replicas: Sequence[State], now: float) -> None:
        self._evict_at = now + self._switch.eviction_s
        for replica in replicas:
            self._tree.trim(replica.id, self._switch.tree_tokens // block_tokens)
        if len(self._first) > len(self._tree.owners):
            self._first = {block: bit for block, bit in self._first.items() if block in self._tree.owners}
