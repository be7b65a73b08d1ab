"""Replica selection: a pure function of read-only views, which also returns its reason."""

from collections.abc import Collection, Sequence
from typing import Final, Protocol

from forebay.core.errors import Code
from forebay.core.model import Policy, ReplicaState, Task
from forebay.core.routing.cpr import cheapest
from forebay.core.routing.late import cheapest_or_wait, worth_a_wait
from forebay.core.routing.policies import (
    consistent_hash,
    home,
    least_requests,
    p2c,
    prefix_affinity,
    round_robin,
)
from forebay.core.routing.pricing import Pricing
from forebay.core.routing.values import ReplicaView, Rng, Route, RoutingRequest, Shed, Wait, Why

CAPACITY_UNKNOWN: Final = 32
"""Assumed for a replica that reports no capacity: unknown is not zero."""
LIVE: Final = (ReplicaState.READY, ReplicaState.DEGRADED)
"""States in which a replica gets requests."""
ENDING: Final = (ReplicaState.DRAINING, ReplicaState.QUARANTINED, ReplicaState.STOPPED)
"""States of a replica that control takes out of service."""
_READY: Final = ReplicaState.READY  # looked up once: enum member access is slow
_DEGRADED: Final = ReplicaState.DEGRADED
_CPR: Final = Policy.CPR
_PREFIX_AFFINITY: Final = Policy.PREFIX_AFFINITY
_CONSISTENT_HASH: Final = Policy.CONSISTENT_HASH
_ROUND_ROBIN: Final = Policy.ROUND_ROBIN
_P2C: Final = Policy.P2C


class Chooser(Protocol):
    """The interface of `choose`; a simulation may substitute another system's policy."""

    def __call__(
        self,
        policy: Policy,
        replicas: Sequence[ReplicaView],
        tried: Collection[tuple[str, int]],
        rng: Rng,
        *,
        request: RoutingRequest | None = None,
        pricing: Pricing | None = None,
    ) -> Route | Wait | Shed:
        """Pick a replica."""


def room(capacity: int, task: Task) -> int:
    """How many requests a replica may hold: those that run at once, and enough queued ones to keep it busy.

    A generating engine admits new requests between two steps, so a quarter more is plenty. A batching engine needs
    the whole next batch when the current one ends.
    """
    capacity = capacity or CAPACITY_UNKNOWN
    return capacity + max(2, capacity // 4) if task is Task.CHAT else 2 * capacity


def effective_state(planned: ReplicaState, reported: ReplicaState) -> ReplicaState:
    """The replica's reported state, unless control is taking it out of service or has marked it degraded."""
    if planned in ENDING or (planned is ReplicaState.DEGRADED and reported is ReplicaState.READY):
        return planned
    return reported


def choose(
    policy: Policy,
    replicas: Sequence[ReplicaView],
    tried: Collection[tuple[str, int]],
    rng: Rng,
    *,
    request: RoutingRequest | None = None,
    pricing: Pricing | None = None,
) -> Route | Wait | Shed:
    """Pick a replica. `tried` holds (id, generation) of those that already failed this request.

    `request` and `pricing` are optional for policies that only count requests; without them, the others do so too.
    """
    ready: list[int] = []
    degraded: list[int] = []
    full: list[int] = []
    dead = False
    for index, replica in enumerate(replicas):
        state = replica.state
        if state is not _READY and state is not _DEGRADED:
            dead = True
        elif tried and (replica.id, replica.generation) in tried:
            continue
        elif replica.load >= replica.room:
            full.append(index)
        else:
            (ready if state is _READY else degraded).append(index)
    pool = ready or degraded
    if request is not None and request.stays and (pool or full):
        return _at_home(replicas, [*ready, *degraded], full, request)
    if pool:
        if full and policy is _CPR and request is not None and request.patient and pricing is not None:
            awaited = worth_a_wait(replicas, pool, full)
            if awaited:
                return cheapest_or_wait(replicas, pool, awaited, request, pricing)
        return _pick(policy, replicas, pool, rng, full=full, request=request, pricing=pricing)
    if full:
        return Wait(Why.FULL)
    if dead or not replicas:  # a restarted replica is a new generation, which was not tried
        return Wait(Why.NONE_READY)
    return Shed(Code.NO_REPLICA, Why.ALL_TRIED, retry_after_s=1)


def _at_home(
    replicas: Sequence[ReplicaView], free: list[int], full: list[int], request: RoutingRequest
) -> Route | Wait:
    """The replica of the request's session, or a wait for it; a new session gets one by its key."""
    for at in (*free, *full):
        if replicas[at].id == request.home:
            return Wait(Why.SESSION_FULL, at) if at in full else Route(at, Why.ITS_SESSION)
    at = home(replicas, [*free, *full], request.key)
    return Wait(Why.SESSION_FULL, at) if at in full else Route(at, Why.NEW_SESSION)


def _pick(
    policy: Policy,
    replicas: Sequence[ReplicaView],
    pool: list[int],
    rng: Rng,
    *,
    full: list[int],
    request: RoutingRequest | None,
    pricing: Pricing | None,
) -> Route:
    """The policy's choice among `pool`, replicas with room; `full`: those without."""
    if len(pool) == 1 and (policy is not _CPR or request is None or pricing is None):
        return Route(pool[0], Why.ONLY)
    if request is not None and pricing is not None:
        if policy is _CPR:
            return cheapest(replicas, pool, request, pricing)
        if policy is _PREFIX_AFFINITY:
            return prefix_affinity(replicas, pool, request, pricing.index)
        if policy is _CONSISTENT_HASH:
            return consistent_hash(replicas, pool, full, request)
    if policy is _ROUND_ROBIN:
        return round_robin(replicas, pool)
    if policy is _P2C:
        return p2c(replicas, pool, rng)
    return least_requests(replicas, pool)
