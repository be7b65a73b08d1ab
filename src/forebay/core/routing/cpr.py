"""Congestion-priced routing: every candidate's cost in seconds, for the request itself and for all others.

cost = w_ttft·(queue + prefill) + w_tpot·decode + price + kv, times a handicap. The price is that of the new work:
with little to do the quickest replica wins, near saturation the one that holds the prompt, without a switch between.
"""

from collections.abc import Sequence
from typing import Final

from forebay.core.routing.pricing import SPREAD_MAX, Pricing
from forebay.core.routing.values import Ask, Route, Score, View, Why

KV_BARRIER_S: Final = 0.15
"""Cost at half-used KV memory; grows without bound towards full, where engines preempt what runs."""
TIE_SHARE: Final = 0.02
TIE_S: Final = 0.005
"""Costs closer than these are the same: estimates are no better."""
SCATTER: Final = 0x9E37_79B1
"""2^32 over the golden ratio: multiplied by it, seeds that differ little lie far apart (Knuth, TAOCP 3, 6.4)."""


def cheapest(replicas: Sequence[View], pool: Sequence[int], ask: Ask, pricing: Pricing) -> Route:
    """The candidate of the lowest cost; among equals a draw, the less loaded the likelier."""
    terms = scores(replicas, pool, ask, pricing)
    late = False
    fits: Sequence[Score] = terms
    if ask.ttft_budget_s is not None:
        fits = [score for score in terms if score.queue_s + score.prefill_s <= ask.ttft_budget_s]
        if not fits:
            late, fits = True, terms
    lowest = min([score.total_s for score in fits])
    highest = lowest + max(TIE_SHARE * lowest, TIE_S)
    near = [score for score in fits if score.total_s <= highest]
    best = near[0] if len(near) == 1 else _draw(replicas, near, ask.seed)
    why = Why.LATE if late else Why.CHEAPEST if len(near) == 1 else Why.DRAWN
    return Route(best.at, why, best.hit_tokens, terms)


def scores(replicas: Sequence[View], pool: Sequence[int], ask: Ask, pricing: Pricing) -> tuple[Score, ...]:
    """What each of the pool would cost. A wait is at that replica's speed, the price of new work at the mean speed.

    Priced at its own speed, work would look dear on a slow replica even when the cache there saves most of it.
    """
    usual, usual_slope = pricing.prefill_tokens_per_s, pricing.decode_slope_s
    slowest = usual / SPREAD_MAX
    meters, masks, speeds, waits = [], [], [], []
    for at in pool:
        meter = replicas[at].meter
        speed = max(meter.prefill_tokens_per_s or usual, slowest)
        meters.append(meter)
        masks.append(meter.mask)
        speeds.append(speed)
        waits.append(meter.queue_tokens / speed)
    depths = pricing.index.depths(ask.blocks, masks)
    price = pricing.price(sum(waits) / len(pool), sum(speeds) / len(pool))
    tokens, block_tokens, output_tokens = ask.tokens, ask.block_tokens, ask.output_tokens
    ttft, tpot = ask.weights
    rows = []
    for at, meter, speed, wait, depth in zip(pool, meters, speeds, waits, depths, strict=True):
        hit = min(depth * block_tokens, tokens)
        uncached = max(1.0, tokens - meter.trust * hit)
        prefill = uncached / speed
        decode = output_tokens * (meter.decode_slope_s or usual_slope) * replicas[at].load
        imposed = uncached * price
        share, handicap = meter.kv_share, meter.handicap
        kv = KV_BARRIER_S * share / (1.0 - share)
        total = (ttft * (wait + prefill) + tpot * decode + imposed + kv) * handicap
        rows.append(Score(at, wait, prefill, decode, imposed, kv, handicap, total, hit))
    return tuple(rows)


def _draw(replicas: Sequence[View], near: Sequence[Score], seed: int) -> Score:
    weights = [1.0 / (1 + replicas[score.at].load) for score in near]
    spot = sum(weights) * (seed * SCATTER & 0xFFFF_FFFF) / 2**32
    for score, weight in zip(near, weights, strict=True):
        spot -= weight
        if spot < 0.0:
            return score
    return near[-1]
