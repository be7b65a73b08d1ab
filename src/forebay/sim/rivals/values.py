"""What another system's router sees, and what it is asked."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, Protocol


class Seen(NamedTuple):
    """A request as a router sees it."""

    id: int
    tokens: int
    """Length of the prompt; at least 1."""
    blocks: tuple[int, ...] = ()
    """Chained ids of the prompt's blocks; empty: nothing is known of what it shares with others."""
    block_tokens: int = 512
    tenant: str = ""
    output_tokens: int = 0
    """Length of the answer. No router knows it; the oracle may look."""


class Report(NamedTuple):
    """What a replica last said of itself; that is as old as the reports of the simulation are."""

    at_s: float = -math.inf
    waiting: int = 0
    """Requests in the engine's queue."""
    running: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of those waiting, as far as the cache does not hold them."""
    kv_share: float = 0.0
    """Share of the KV memory that requests hold, 0..1; what is only cached counts as free."""
    kv_tokens: int = 0
    """Size of the KV memory; 0: not said."""


UNHEARD: Final = Report()
"""Of a replica that has not reported yet."""


class Truth(Protocol):
    """What the engine itself would say at this moment, if nothing else came. For the oracle only."""

    def first_token_s(self, request: Seen) -> float:
        """When this request would have its first token: after all that waits, at the real speed."""

    def read_s(self, request: Seen) -> float:
        """How much of that is the reading of its own prompt, without what the cache will hold by then."""

    def token_s(self) -> float:
        """The time from token to token if one more request ran."""


@dataclass(slots=True, eq=False)
class State:
    """One replica as one gateway sees it."""

    id: str
    alive: bool = True
    in_flight: int = 0
    """Requests that this gateway has sent there and that have not ended."""
    report: Report = UNHEARD
    cached: Container[int] = ()
    """The blocks that its cache holds by its own word: for routers that listen to the events of engines."""
    truth: Truth | None = None


class Rival:
    """A routing policy. It sends every request on at once and leaves queueing to the engines."""

    __slots__ = ()

    def choose(self, request: Seen, replicas: Sequence[State], now: float, rng: Random) -> int:
        """The index of a replica that is alive. Raises ValueError if none is."""
        raise NotImplementedError

    def sent(self, request: Seen, replica: State, now: float) -> None:
        """The request went to this replica, the one just chosen; `in_flight` may count it already."""

    def first_token(self, request: Seen, replica: State, now: float) -> None:
        """Its answer begins."""

    def done(self, request: Seen, replica: State, now: float) -> None:
        """It has ended, well or not."""


def live(replicas: Sequence[State]) -> list[int]:
    """The indexes of those alive. Raises ValueError if none is."""
    alive = [at for at, replica in enumerate(replicas) if replica.alive]
    if not alive:
        raise ValueError("no replica is alive")
    return alive


def drawn(alive: Sequence[int], costs: Sequence[float], rng: Random) -> int:
    """One of those of the lowest cost, at random."""
    lowest = min(costs)
    return rng.choice([at for at, cost in zip(alive, costs, strict=True) if cost == lowest])


def held(blocks: Sequence[int], cached: Container[int]) -> int:
    """How many blocks from the first on a cache holds."""
    for depth, block in enumerate(blocks):
        if block not in cached:
            return depth
    return len(blocks)


def hit_tokens(request: Seen, depth: int) -> int:
    """How much of the prompt so many of its blocks are: the last one may be a part of a block."""
    return min(depth * request.block_tokens, request.tokens)
