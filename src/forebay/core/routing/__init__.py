"""Replica selection, and what is learned from finished requests: pure functions and plain accounting."""

from forebay.core.prefix.index import PrefixIndex, Source
from forebay.core.routing.choice import CAPACITY_UNKNOWN, ENDING, LIVE, Chooser, choose, effective_state, room
from forebay.core.routing.late import HOLD_S, learned_room, may_wait, share_of_room
from forebay.core.routing.meter import Charge, Meter
from forebay.core.routing.pricing import Pricing
from forebay.core.routing.speed import Lengths
from forebay.core.routing.values import (
    BATCH,
    INTERACTIVE,
    ReplicaView,
    Rng,
    Route,
    RoutingRequest,
    Score,
    Shed,
    Wait,
    Weights,
    Why,
)

__all__ = [
    "BATCH",
    "CAPACITY_UNKNOWN",
    "ENDING",
    "HOLD_S",
    "INTERACTIVE",
    "LIVE",
    "Charge",
    "Chooser",
    "Lengths",
    "Meter",
    "PrefixIndex",
    "Pricing",
    "ReplicaView",
    "Rng",
    "Route",
    "RoutingRequest",
    "Score",
    "Shed",
    "Source",
    "Wait",
    "Weights",
    "Why",
    "choose",
    "effective_state",
    "learned_room",
    "may_wait",
    "room",
    "share_of_room",
]
