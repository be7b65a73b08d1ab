"""Late binding: where a request costs least no room is left, and to wait for it may be better than to go elsewhere.

An engine whose memory is full lets requests wait, and what waits there has lost the choice. So a replica that says so
gets no more than it runs, and requests wait in the gateway: for the best one, once no engine has memory to spare.
While engines have room nothing of this happens.
"""

from collections.abc import Sequence
from typing import Final

from forebay.core.routing.cpr import best_of, scores
from forebay.core.routing.pricing import Pricing
from forebay.core.routing.values import Ask, Route, View, Wait, Why

KV_FULL: Final = 0.9
"""Share of the KV memory in use from which what waits in an engine waits for memory, and not to be read."""
EASED: Final = 0.6
"""Share of the KV memory in use below which a replica has room to spare, and while one has nobody waits for another.
Who was full is so until less than this of both its memory and its places is in use."""
SPARE: Final = 2
"""Requests that may wait in an engine that is full: it never runs dry between two of its steps."""
GROWTH: Final = 1 / 32
"""Of what runs there: so many more a full replica gets from one report to the next while nothing waits there."""
SLACK_S: Final = 0.3
"""Nobody waits to save less."""
HOLD_S: Final = 30.0
"""A replica that has let nobody in for so long is not waited for: it may never do so again."""
PATIENCE_SHARE: Final = 0.5
"""Of the time that a request has, for which it may wait although some replica, or another model, has room."""


def learned_room(filled: bool, most: int, places: int, *, running: int, waiting: int, kv_share: float) -> int | None:
    """How many requests a generating engine has room for, by its load report; None: it is not full.

    `filled` is whether it was at the report before, and `most` what it may hold at all. One that does not report what
    waits in it is never full.
    """
    if waiting > 0 and (filled or kv_share >= KV_FULL or running >= places):
        return min(most, running + SPARE)
    if filled and (kv_share >= EASED or running >= EASED * places):
        return min(most, running + max(SPARE, int(GROWTH * running)))
    return None


def share_of_room(room: int, load: int, gateways: int) -> int:
    """The room of one of several gateways: all of them see the same places free, and each takes its share of them."""
    return load + -(-(room - load) // gateways) if room > load else room


def worth_a_wait(replicas: Sequence[View], pool: Sequence[int], full: Sequence[int]) -> list[int]:
    """Those of `full` whose engines are; none while any of the open ones in `pool` has memory to spare."""
    if min([replicas[at].meter.kv_share for at in pool]) < EASED:
        return []
    return [at for at in full if replicas[at].meter.strained]


def cheapest_or_wait(
    replicas: Sequence[View], pool: Sequence[int], full: Sequence[int], ask: Ask, pricing: Pricing
) -> Route | Wait:
    """The candidate of the lowest cost in `pool`, or a wait for one of `full` that costs less by `SLACK_S`."""
    terms = scores(replicas, [*pool, *full], ask, pricing)
    open_to, shut = terms[: len(pool)], terms[len(pool) :]
    best = min(shut, key=lambda score: (score.total_s, score.at))
    if min([score.total_s for score in open_to]) > best.total_s + SLACK_S:
        return Wait(Why.BEST_FULL, best.at)
    route = best_of(open_to, ask)
    route.terms = terms
    return route


def may_wait(began: float, deadline: float, now: float) -> bool:
    """Whether a request with such a deadline may still be kept waiting for what is best for it."""
    return now < began + PATIENCE_SHARE * (deadline - began)
