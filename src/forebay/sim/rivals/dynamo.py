"""NVIDIA Dynamo's KV router: queued prefill and active requests, both in KV blocks."""

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from forebay.sim.rivals.history import Counted, Expected, Unread
from forebay.sim.rivals.values import Rival, RoutedRequest, State, drawn, held, hit_tokens, live


class Weights(NamedTuple):
    """Settings of the router, with its defaults."""

    prefill: float = 1.0
    """`prefill_load_scale`; once called the overlap weight."""
    credit: float = 1.0
    """`overlap_score_credit`: how much a cached block reduces the work, 0..1."""
    decay: float = 0.0
    """`overlap_score_credit_decay`: how fast the credit decays where more prompts wait than elsewhere."""
    temperature: float = 0.0
    """0: the lowest cost; above: softmax over the costs, scaled to 0..1."""
    events: bool = True
    """Engines report their caches."""
    predicted_s: float | None = None
    """How long prompts sent to a replica are assumed to be cached."""


class KvRouter(Rival):
    """cost = prefill · max(0, queued prefill + prompt - credit · overlap) + active blocks including the request's
    own.

    A prompt's uncached part counts as queued until its first token arrives. Active blocks are those of prompts in
    flight, each once; generated tokens are not counted. Ties are drawn. The router's option to hold requests back
    (while 16 full steps of prompts wait everywhere, as shipped) is left out.
    """

    __slots__ = ("_active", "_expected", "_loose", "_unread", "_weights")

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._unread = Unread()
        self._active = Counted()
        self._loose: dict[str, int] = {}
        """Active blocks of unknown content, which are not shared."""
        self._expected = None if weights.predicted_s is None else Expected(weights.predicted_s)

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        costs = self.costs(request, [replicas[at] for at in alive], now)
        low, high = min(costs), max(costs)
        temperature = self._weights.temperature
        if not temperature or low == high:
            return drawn(alive, costs, rng)
        scale = (high - low) * temperature
        odds = [math.exp((low - cost) / scale) for cost in costs]
        return rng.choices(alive, odds)[0]

    def costs(self, request: RoutedRequest, replicas: Sequence[State], now: float) -> list[float]:
        """Cost of each of these replicas, in blocks."""
        size = request.block_tokens
        prefill, credit, decay, *_ = self._weights
        own = math.ceil(request.tokens / size)
        overlaps = self._overlaps(request, replicas, now)
        in_use = self._active.depths(request.blocks, [replica.id for replica in replicas])
        unread = [self._unread.tokens(replica.id) for replica in replicas]
        least = min(unread)
        costs = []
        for replica, overlap, shared, queue in zip(replicas, overlaps, in_use, unread, strict=True):
            faded = credit / (1.0 + decay * (queue - least) / size / own)
            read = max(0.0, (queue + request.tokens - faded * overlap) / size)
            active = self._active.count(replica.id) + self._loose.get(replica.id, 0)
            costs.append(prefill * read + active + own - shared)
        return costs

    def sent(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        (overlap,) = self._overlaps(request, [replica], now)
        self._unread.charge(request, replica, request.tokens - overlap)
        self._active.add(replica.id, request.blocks)
        self._loosen(request, replica, 1)
        if self._expected is not None:
            self._expected.add(replica.id, request.blocks, now)

    def first_token(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        self._unread.release(request, replica)

    def done(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        self._unread.release(request, replica)
        self._active.remove(replica.id, request.blocks)
        self._loosen(request, replica, -1)

    def _overlaps(self, request: RoutedRequest, replicas: Sequence[State], now: float) -> list[int]:
        """Cached tokens of the prompt at each replica, reported or predicted."""
        blocks = request.blocks
        depths = [held(blocks, replica.cached) if self._weights.events else 0 for replica in replicas]
        if self._expected is not None:
            expected = self._expected.depths(blocks, [replica.id for replica in replicas], now)
            depths = list(map(max, depths, expected))
        return [hit_tokens(request, depth) for depth in depths]

    def _loosen(self, request: RoutedRequest, replica: State, sign: int) -> None:
        blocks = max(0, math.ceil(request.tokens / request.block_tokens) - len(request.blocks))
        self._loose[replica.id] = self._loose.get(replica.id, 0) + sign * blocks
