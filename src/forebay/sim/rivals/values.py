"""The interface of another system's router."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, Protocol


class RoutedRequest(NamedTuple):
    """A request as a router sees it."""

    id: int
    tokens: int
    """Prompt length; at least 1."""
    blocks: tuple[int, ...] = ()
    """Chained ids of the prompt's blocks; empty: shared prefixes are unknown."""
    block_tokens: int = 512
    tenant: str = ""
    output_tokens: int = 0
    """Response length. Only the oracle may use it."""


class Report(NamedTuple):
    """A replica's last report, as old as the simulation's report interval allows."""

    at_s: float = -math.inf
    waiting: int = 0
    """Requests in the engine's queue."""
    running: int = 0
    waiting_tokens: int = 0
    """Uncached prompt tokens of the queued requests."""
    kv_share: float = 0.0
    """Share of the KV memory held by requests, 0..1; merely cached blocks count as free."""
    kv_tokens: int = 0
    """Size of the KV memory; 0: unknown."""


UNHEARD: Final = Report()
"""Used before a replica's first report."""


class Truth(Protocol):
    """The engine's true state, assuming no further arrivals. For the oracle only."""

    def first_token_s(self, request: RoutedRequest) -> float:
        """The request's time to first token: after all queued requests, at the real speed."""

    def read_s(self, request: RoutedRequest) -> float:
        """The part of it that is its own prefill, without what will be cached by then."""

    def token_s(self) -> float:
        """Time per token if one more request ran."""


@dataclass(slots=True, eq=False)
class State:
    """One replica as one gateway sees it."""

    id: str
    alive: bool = True
    in_flight: int = 0
    """This gateway's requests in flight there."""
    report: Report = UNHEARD
    cached: Container[int] = ()
    """Blocks that it reports as cached, for routers that use engine events."""
    truth: Truth | None = None


class Rival:
    """A routing policy. It dispatches every request at once and leaves queueing to the engines."""

    __slots__ = ()

    def choose(self, request: RoutedRequest, replicas: Sequence[State], now: float, rng: Random) -> int:
        """The index of a live replica. Raises ValueError if there is none."""
        raise NotImplementedError

    def sent(self, request: RoutedRequest, replica: State, now: float) -> None:
        """The request was sent to this replica, the one just chosen; `in_flight` may include it already."""

    def first_token(self, request: RoutedRequest, replica: State, now: float) -> None:
        """Its response begins."""

    def done(self, request: RoutedRequest, replica: State, now: float) -> None:
        """It has ended, successfully or not."""


def live(replicas: Sequence[State]) -> list[int]:
    """The indexes of live replicas. Raises ValueError if there are none."""
    alive = [at for at, replica in enumerate(replicas) if replica.alive]
    if not alive:
        raise ValueError("no replica is alive")
    return alive


def drawn(alive: Sequence[int], costs: Sequence[float], rng: Random) -> int:
    """A random one of those with the lowest cost."""
    lowest = min(costs)
    return rng.choice([at for at, cost in zip(alive, costs, strict=True) if cost == lowest])


def held(blocks: Sequence[int], cached: Container[int]) -> int:
    """Length of the cached prefix, in blocks."""
    for depth, block in enumerate(blocks):
        if block not in cached:
            return depth
    return len(blocks)


def hit_tokens(request: RoutedRequest, depth: int) -> int:
    """Tokens in this many blocks of the prompt; the last block may be partial."""
    return min(depth * request.block_tokens, request.tokens)
