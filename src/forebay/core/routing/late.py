"""Late binding: waiting in the gateway for the cheapest replica, if that beats going elsewhere at once.

A request that queues inside an engine whose KV memory is full can no longer be rerouted. So a replica that reports
this gets no more requests than it runs; the others wait in the gateway for the best replica, once no engine has
memory to spare. While engines have room, none of this applies.
"""

from collections.abc import Sequence
from typing import Final

from forebay.core.routing.cpr import best_of, scores
from forebay.core.routing.pricing import Pricing
from forebay.core.routing.values import ReplicaView, Route, RoutingRequest, Wait, Why

KV_FULL: Final = 0.9
"""Share of the KV memory in use above which queued requests wait for memory rather than for prefill."""
EASED: Final = 0.6
"""Share of the KV memory in use below which a replica has room to spare; while one has, no request waits for another.
A full replica stays marked full until both its memory and its slots are used less than this."""
SPARE: Final = 2
"""Requests that may queue in a full engine, so that it never runs dry between two steps."""
GROWTH: Final = 1 / 32
"""Growth of a full replica's limit per report while it queues nothing, as a share of its running requests."""
SLACK_S: Final = 0.3
"""Minimum saving that is worth a wait."""
HOLD_S: Final = 30.0
"""A replica that has admitted nothing for this long is not waited for: it may never do so again."""
PATIENCE_SHARE: Final = 0.5
"""Share of a request's time limit that it may spend waiting although some replica, or another model, has room."""


def learned_room(filled: bool, most: int, places: int, *, running: int, waiting: int, kv_share: float) -> int | None:
    """How many requests a generating engine has room for, by its load report; None: it is not full.

    `filled`: whether it was full at the previous report; `most`: upper bound. An engine that does not report its
    queue is never full.
    """
    if waiting > 0 and (filled or kv_share >= KV_FULL or running >= places):
        return min(most, running + SPARE)
    if filled and (kv_share >= EASED or running >= EASED * places):
        return min(most, running + max(SPARE, int(GROWTH * running)))
    return None


def share_of_room(room: int, load: int, gateways: int) -> int:
    """One gateway's share of a replica's room: all gateways see the same free slots, so each takes an equal part."""
    return load + -(-(room - load) // gateways) if room > load else room


def worth_a_wait(replicas: Sequence[ReplicaView], pool: Sequence[int], full: Sequence[int]) -> list[int]:
    """The replicas of `full` whose engines are full; none while any open replica in `pool` has memory to spare."""
    if min([replicas[at].meter.kv_share for at in pool]) < EASED:
        return []
    return [at for at in full if replicas[at].meter.strained]


def cheapest_or_wait(
    replicas: Sequence[ReplicaView],
    pool: Sequence[int],
    full: Sequence[int],
    request: RoutingRequest,
    pricing: Pricing,
) -> Route | Wait:
    """The cheapest candidate in `pool`, or a wait for one of `full` that is cheaper by more than `SLACK_S`."""
    terms = scores(replicas, [*pool, *full], request, pricing)
    open_to, shut = terms[: len(pool)], terms[len(pool) :]
    best = min(shut, key=lambda score: (score.total_s, score.at))
    if min([score.total_s for score in open_to]) > best.total_s + SLACK_S:
        return Wait(Why.BEST_FULL, best.at)
    route = best_of(open_to, request)
    route.terms = terms
    return route


def may_wait(began: float, deadline: float, now: float) -> bool:
    """Whether a request with this deadline may still be kept waiting for its best replica."""
    return now < began + PATIENCE_SHARE * (deadline - began)
