"""Congestion-priced routing: each candidate's cost in seconds, to the request itself and to all others.

cost = w_ttft·(queue + prefill) + w_tpot·decode + price + kv, times a handicap. The price is the delay that the new
work causes to queued and running requests: at low load the fastest replica wins, near saturation the one that has the
prompt cached, with a gradual transition. Weights and constants were chosen by simulation (docs/routing.md).
"""

import math
from collections.abc import Sequence
from typing import Final

from forebay.core.routing.pricing import SPREAD_MAX, Pricing
from forebay.core.routing.values import ReplicaView, Route, RoutingRequest, Score, Why

_LATE: Final = Why.LATE  # looked up once: enum member access is slow
_CHEAPEST: Final = Why.CHEAPEST
_DRAWN: Final = Why.DRAWN
_HELD: Final = Why.HELD
_ONLY: Final = Why.ONLY

KV_BARRIER_S: Final = 0.15
"""Cost at half-used KV memory; grows without bound towards full, where engines preempt running requests."""
SLOPE_SPREAD_MAX: Final = 2.0
"""Limits a replica's slope to this factor of the typical one: prefill pauses distort the measurements."""
PAUSE: Final = 0.15
"""Prefilling a prompt pauses all running requests: weight of a second of that pause for each of them, as in
`Weights`."""
TIE_SHARE: Final = 0.02
TIE_S: Final = 0.005
"""Costs within these margins are ties: the estimates are no more precise."""
SCATTER: Final = 0x9E37_79B1
"""2^32 over the golden ratio: a multiplier that spreads similar seeds far apart (Knuth, TAOCP 3, 6.4)."""


def cheapest(
    replicas: Sequence[ReplicaView], pool: Sequence[int], request: RoutingRequest, pricing: Pricing
) -> Route:
    """The candidate with the lowest cost; ties are drawn at random, in favour of less loaded replicas.

    TTFT budgets are no constraint here: avoiding the replica that has the prompt cached because it would be late
    makes other requests late too.
    """
    return best_of(scores(replicas, pool, request, pricing), request)


def best_of(terms: list[Score], request: RoutingRequest) -> Route:
    """The scored candidate with the lowest cost; ties are drawn at random."""
    lowest = math.inf
    for score in terms:
        lowest = min(lowest, score.total_s)
    highest = lowest + max(TIE_SHARE * lowest, TIE_S)
    near = [score for score in terms if score.total_s <= highest]
    best = near[0] if len(near) == 1 else _draw(near, request.seed)
    budget_s = request.ttft_budget_s
    if request.held:
        why = _HELD
    elif len(terms) == 1:
        why = _ONLY
    elif budget_s is not None and best.queue_s + best.prefill_s > budget_s:
        why = _LATE
    else:
        why = _CHEAPEST if len(near) == 1 else _DRAWN
    return Route(best.at, why, best.hit_tokens, terms)


def scores(
    replicas: Sequence[ReplicaView], pool: Sequence[int], request: RoutingRequest, pricing: Pricing
) -> list[Score]:
    """The cost of each candidate. Waits use the candidate's own speed, the price of new work the mean speed.

    Priced at its own speed, work would look expensive on a slow replica even when its cache saves most of it.
    """
    usual, usual_slope = pricing.prefill_tokens_per_s, pricing.decode_slope_s
    slowest, steepest = usual / SPREAD_MAX, usual_slope * SLOPE_SPREAD_MAX
    queues_s = speeds = 0.0
    masks, views = [], [replicas[at] for at in pool]
    for view in views:
        meter = view.meter
        speed = max(meter.prefill_tokens_per_s or usual, slowest)
        speeds += speed
        queues_s += meter.queue_tokens / speed
        masks.append(meter.mask)
    depths = pricing.index.depths(request.blocks, masks)
    mean = speeds / len(pool)
    ttft, tpot, work = request.weights
    # both in seconds per uncached token; the pause also counts per running request
    price, pause = pricing.price(queues_s / len(pool), mean) + work / mean, PAUSE / mean
    tokens, block_tokens, output_tokens = request.tokens, request.block_tokens, request.output_tokens
    terms = []
    for n, at in enumerate(pool):
        meter, load = views[n].meter, views[n].load
        speed = max(meter.prefill_tokens_per_s or usual, slowest)
        hit = min(depths[n] * block_tokens, tokens)
        uncached = max(1.0, tokens - meter.trust * hit)
        queue_s, prefill_s = meter.queue_tokens / speed, uncached / speed
        slope = min(max(meter.decode_slope_s or usual_slope, usual_slope / SLOPE_SPREAD_MAX), steepest)
        decode_s = output_tokens * slope * load
        price_s = uncached * (price + pause * load)
        share, handicap = meter.kv_share, meter.handicap
        kv_s = KV_BARRIER_S * share / (1.0 - share)
        total_s = (ttft * (queue_s + prefill_s) + tpot * decode_s + price_s + kv_s) * handicap
        terms.append(
            Score(
                at, load, queue_s=queue_s, prefill_s=prefill_s, decode_s=decode_s, price_s=price_s, kv_s=kv_s,
                handicap=handicap, total_s=total_s, hit_tokens=hit,
            )
        )  # fmt: skip
    return terms


def _draw(near: list[Score], seed: int) -> Score:
    """One of `near`, with a probability in inverse proportion to its load; the same one for the same seed."""
    weights = 0.0
    for score in near:
        weights += 1.0 / (1 + score.load)
    spot = weights * (seed * SCATTER & 0xFFFF_FFFF) / 2**32
    for score in near[:-1]:
        spot -= 1.0 / (1 + score.load)
        if spot < 0.0:
            return score
    return near[-1]
