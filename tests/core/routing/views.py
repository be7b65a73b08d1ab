"""Replicas of tests as routing looks at them: compiled code takes only a `ReplicaView` for one."""

from collections.abc import Collection, Iterable
from typing import Protocol

from forebay.core import routing
from forebay.core.model import Policy, ReplicaState
from forebay.core.routing import Meter, Pricing, ReplicaView, Route, RoutingRequest, Shed, Wait
from forebay.core.routing.values import Rng


class Looked(Protocol):
    """What a test says of a replica; see `ReplicaView`."""

    @property
    def id(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def state(self) -> ReplicaState: ...
    @property
    def load(self) -> int: ...
    @property
    def room(self) -> int: ...
    @property
    def last_used(self) -> int: ...
    @property
    def meter(self) -> Meter: ...


def view(replica: Looked) -> ReplicaView:
    """How it is now."""
    seen = ReplicaView()
    seen.id, seen.generation, seen.state = replica.id, replica.generation, replica.state
    seen.load, seen.room, seen.last_used, seen.meter = replica.load, replica.room, replica.last_used, replica.meter
    seen.places = getattr(replica, "places", 0)
    return seen


def choose(
    policy: Policy,
    replicas: Iterable[Looked],
    tried: Collection[tuple[str, int]],
    rng: Rng,
    *,
    request: RoutingRequest | None = None,
    pricing: Pricing | None = None,
) -> Route | Wait | Shed:
    """`forebay.core.routing.choose`."""
    return routing.choose(policy, [view(each) for each in replicas], tried, rng, request=request, pricing=pricing)
