"""The endpoint picker of the Gateway API inference extension, which is llm-d's router: weighted scorers.

It relies on the last metrics scrape (every 50 ms as shipped) and ignores what it has sent since.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from forebay.sim.rivals.history import Lately, Unread
from forebay.sim.rivals.values import Rival, RoutedRequest, State, drawn, held, hit_tokens, live

MATCHED_TOKENS_MAX: Final = 131_072
"""Longer shared prefixes are not compared."""
KV_TOKENS: Final = 31_250 * 16
"""Default cache size of a replica: 31,250 blocks of 16 tokens."""
COARSE: Final = 4.0
"""Its index has as many blocks as the engine, but of 64 tokens instead of vLLM's 16: it remembers four times more."""
PEAK_TOKENS_PER_S: Final = 15_928.0
"""Prefill speed that its affinity filter assumes: Qwen 32B on two H100."""


class Scorers(Rival):
    """The highest sum of weighted scores of 0..1; ties at random.

    Queue: (most waiting - waiting) / (most - fewest waiting), 1 if all are equal. KV: 1 - share in use. Prefix:
    matched / all blocks of the prompt, by its own record of sent prompts or, with `events`, by the engines' reports.
    """

    __slots__ = ("_events", "_kv", "_prefix", "_queue", "_remembers", "_sent")

    def __init__(
        self,
        queue: float = 2.0,
        kv: float = 2.0,
        prefix: float = 3.0,
        *,
        remembers: float = COARSE,
        events: bool = False,
    ) -> None:
        self._queue, self._kv, self._prefix = queue, kv, prefix
        self._remembers = remembers
        self._events = events
        self._sent = Lately()

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        waiting = [replicas[at].report.waiting for at in alive]
        most, spread = max(waiting), max(waiting) - min(waiting)
        blocks = request.blocks[: MATCHED_TOKENS_MAX // request.block_tokens]
        each = self._prefix / max(1, len(blocks))
        if self._events:
            matched = [held(blocks, replicas[at].cached) for at in alive]
        else:
            matched = self._matched(blocks, [replicas[at].id for at in alive])
        costs = []
        for at, waits, match in zip(alive, waiting, matched, strict=True):
            score = each * match + self._kv * (1.0 - replicas[at].report.kv_share)
            costs.append(-score - self._queue * ((most - waits) / spread if spread else 1.0))
        return drawn(alive, costs, rng)

    def sent(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        if self._events:
            return
        blocks = request.blocks[: MATCHED_TOKENS_MAX // request.block_tokens]
        self._sent.add(replica.id, blocks)  # in this order the beginning of a prompt is forgotten first
        size = self._remembers * (replica.report.kv_tokens or KV_TOKENS) / request.block_tokens
        self._sent.trim(replica.id, int(size))

    def _matched(self, blocks: Sequence[int], ids: Sequence[str]) -> list[int]:
        """Matching blocks of each replica before the first block that no replica has, even if it lacks some of
        them."""
        owners = self._sent.owners.get
        runs: dict[int, int] = {}
        for block in blocks:
            mask = owners(block, 0)
            if not mask:
                break
            runs[mask] = runs.get(mask, 0) + 1
        bits = [self._sent.bit(id) for id in ids]
        return [sum([count for mask, count in runs.items() if mask & bit]) for bit in bits]


class TokenLoad(Rival):
    """llm-d's later setting: replicas that have 80 % of the prompt cached, and of them the one with the least prefill
    work.

    Work is what this gateway has sent there and what has no first token yet, plus the request's own uncached part. If
    these replicas would be slower than others by more than 18 s, all are considered.
    """

    __slots__ = ("_penalty_s", "_share_min", "_tokens_per_s", "_unread")

    def __init__(
        self, *, share_min: float = 0.8, penalty_s: float = 18.0, tokens_per_s: float = PEAK_TOKENS_PER_S
    ) -> None:
        self._share_min = share_min
        self._penalty_s = penalty_s
        self._tokens_per_s = tokens_per_s
        self._unread = Unread()

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """See `Rival`."""
        alive = live(replicas)
        hits = {at: hit_tokens(request, held(request.blocks, replicas[at].cached)) for at in alive}
        load = {at: self._unread.tokens(replicas[at].id) for at in alive}
        enough = self._share_min * request.tokens
        holders = [at for at in alive if hits[at] >= enough]
        others = [at for at in alive if hits[at] < enough]
        if holders and others:
            later = min([load[at] for at in holders]) - min([load[at] for at in others])
            pool = alive if later > self._penalty_s * self._tokens_per_s else holders
        else:
            pool = alive
        return drawn(pool, [load[at] - hits[at] for at in pool], rng)

    def sent(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        hit = hit_tokens(request, held(request.blocks, replica.cached))
        self._unread.charge(request, replica, request.tokens - hit)

    def first_token(self, request: RoutedRequest, replica: State, now: float) -> None:
        """See `Rival`."""
        self._unread.release(request, replica)

    done = first_token
