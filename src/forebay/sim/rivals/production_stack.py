"""Two routers of vLLM's production-stack: `prefixaware`, which ignores load, and its fix `loadaware`."""

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Final

from forebay.sim.rivals.history import Owners
from forebay.sim.rivals.values import Rival, RoutedRequest, State, held, hit_tokens, live

RATE_WINDOW_S: Final = 60.0
"""Window over which the router measures a replica's request rate."""


class PrefixAware(Rival):
    """A random one of those that got the longest prefix of the prompt before. Nothing is ever evicted.

    `match_tokens_min`: shorter matches are ignored; then the replica with the lowest request rate is chosen, first
    those without any requests.
    """

    __slots__ = ("_match_tokens_min", "_sent", "_trie")

    def __init__(self, *, match_tokens_min: int = 0) -> None:
        self._match_tokens_min = match_tokens_min
        self._trie = Owners()
        self._sent: dict[str, deque[float]] = {}

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        depths = self._trie.depths(request.blocks, [replicas[at].id for at in alive])
        longest = max(depths)
        if hit_tokens(request, longest) < self._match_tokens_min:
            return min(alive, key=lambda at: self._recent(replicas[at].id, now))
        return rng.choice([at for at, depth in zip(alive, depths, strict=True) if depth == longest])

    def sent(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        bit, owners = self._trie.bit(replica.id), self._trie.owners
        for block in request.blocks:
            owners[block] = owners.get(block, 0) | bit
        if self._match_tokens_min:
            self._sent.setdefault(replica.id, deque()).append(now)

    def _recent(self, id: str, now: float) -> int:
        """Requests within the window; -1: never any."""
        sent = self._sent.get(id)
        if sent is None:
            return -1
        while sent and sent[0] < now - RATE_WINDOW_S:
            sent.popleft()
        return len(sent)


class LoadAware(Rival):
    """The highest of: cached share of the prompt - beta · (requests - their mean) / max(1, their mean).

    Cached blocks are known from the engines' reports.
    """

    __slots__ = ("_beta",)

    def __init__(self, *, beta: float = 1.0) -> None:
        self._beta = beta

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        mean = sum([replicas[at].in_flight for at in alive]) / len(alive)
        price = self._beta / max(1.0, mean)

        def score(at: int) -> float:
            replica = replicas[at]
            share = hit_tokens(request, held(request.blocks, replica.cached)) / request.tokens
            return share - price * (replica.in_flight - mean)

        return max(alive, key=score)
