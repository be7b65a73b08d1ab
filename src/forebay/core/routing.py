"""Which replica gets a request: pure choices over read-only views, each with its reason."""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from forebay.core.errors import Code
from forebay.core.model import Policy, ReplicaState, Task

CAPACITY_UNKNOWN: Final = 32
"""Assumed of a replica that reports no capacity: unknown is never zero."""
LIVE: Final = (ReplicaState.READY, ReplicaState.DEGRADED)
ENDING: Final = (ReplicaState.DRAINING, ReplicaState.QUARANTINED, ReplicaState.STOPPED)


class View(Protocol):
    """One replica as its gateway sees it now."""

    @property
    def id(self) -> str:
        """The slot."""

    @property
    def generation(self) -> int:
        """Which start of the slot."""

    @property
    def state(self) -> ReplicaState:
        """Only READY and DEGRADED replicas get requests."""

    @property
    def load(self) -> int:
        """Requests at the replica: this gateway's, and those of others as far as reported."""

    @property
    def room(self) -> int:
        """Load at which it is full."""

    @property
    def last_used(self) -> int:
        """A number that grows with every use of any replica."""


class Rng(Protocol):
    """The part of random.Random that choices need."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 to below `stop`."""


class Why(StrEnum):
    """Reason of a choice."""

    NEXT = "next in turn"
    FEWEST = "fewest requests"
    FEWER_OF_TWO = "fewer requests of two at random"
    ONLY = "the only one with room"
    FULL = "every replica is full"
    NONE_READY = "no replica is ready"
    ALL_TRIED = "every live replica was tried"


class Route(NamedTuple):
    """Send it to `replicas[at]`."""

    at: int
    why: Why


class Wait(NamedTuple):
    """No replica can take it now, but one may later."""

    why: Why


class Shed(NamedTuple):
    """Refuse it."""

    code: Code
    why: Why
    retry_after_s: int


def room(capacity: int, task: Task) -> int:
    """How many requests a replica may hold: what runs at once, and enough waiting to never run dry.

    A generating engine takes in the next request between two steps, so a quarter more is plenty. A batching engine
    needs the whole next batch at hand when the current one ends.
    """
    capacity = capacity or CAPACITY_UNKNOWN
    return 2 * capacity if task is Task.EMBED else capacity + max(2, capacity // 4)


def effective_state(planned: ReplicaState, reported: ReplicaState) -> ReplicaState:
    """The replica's own word counts, except that control can take it out of service or call it degraded."""
    if planned in ENDING or (planned is ReplicaState.DEGRADED and reported is ReplicaState.READY):
        return planned
    return reported


def choose(
    policy: Policy, replicas: Sequence[View], tried: Collection[tuple[str, int]], rng: Rng
) -> Route | Wait | Shed:
    """Pick a replica. `tried` holds (id, generation) of those that already failed this request."""
    ready: list[int] = []
    degraded: list[int] = []
    full = dead = False
    for index, replica in enumerate(replicas):
        state = replica.state
        if state not in LIVE:
            dead = True
        elif tried and (replica.id, replica.generation) in tried:
            continue
        elif replica.load >= replica.room:
            full = True
        else:
            (ready if state is ReplicaState.READY else degraded).append(index)
    pool = ready or degraded
    if pool:
        return _pick(policy, replicas, pool, rng)
    if full:
        return Wait(Why.FULL)
    if dead or not replicas:  # what comes back is a new generation, which was not tried
        return Wait(Why.NONE_READY)
    return Shed(Code.NO_REPLICA, Why.ALL_TRIED, retry_after_s=1)


def _pick(policy: Policy, replicas: Sequence[View], pool: list[int], rng: Rng) -> Route:
    if len(pool) == 1:
        return Route(pool[0], Why.ONLY)
    why = Why.NEXT if policy is Policy.ROUND_ROBIN else Why.FEWEST
    if policy is Policy.P2C and len(pool) > 2:
        first = rng.randrange(len(pool))
        second = rng.randrange(len(pool) - 1)
        pool = [pool[first], pool[second + (second >= first)]]
        why = Why.FEWER_OF_TWO
    best = pool[0]
    least = _rank(policy, replicas[best])
    for index in pool[1:]:
        rank = _rank(policy, replicas[index])
        if rank < least:
            best, least = index, rank
    return Route(best, why)


def _rank(policy: Policy, replica: View) -> tuple[int, int, str]:
    load = 0 if policy is Policy.ROUND_ROBIN else replica.load
    return load, replica.last_used, replica.id
