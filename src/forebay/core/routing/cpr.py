"""Congestion-priced routing: every candidate's cost in seconds, for the request itself and for all others.

cost = w_ttft·(queue + prefill) + w_tpot·decode + price + kv, times a handicap. The price is that of the new work, for
who waits and for who runs there: with little to do the quickest replica wins, near saturation the one that holds the
prompt, without a switch between. Weights and constants were chosen by simulation (docs/routing.md).
"""

import math
from collections.abc import Sequence
from typing import Final

from forebay.core.routing.pricing import SPREAD_MAX, Pricing
from forebay.core.routing.values import Ask, Route, Score, View, Why

_LATE: Final = Why.LATE  # looked up once: members of an enum are slow to get at
_CHEAPEST: Final = Why.CHEAPEST
_DRAWN: Final = Why.DRAWN
_HELD: Final = Why.HELD
_ONLY: Final = Why.ONLY

KV_BARRIER_S: Final = 0.15
"""Cost at half-used KV memory; grows without bound towards full, where engines preempt what runs."""
SLOPE_SPREAD_MAX: Final = 2.0
"""How far from the usual a replica's slope is believed: pauses while prompts are read blur what is learned."""
PAUSE: Final = 0.15
"""While a prompt is read, all that run there pause: what a second of that counts for each, as in `Weights`."""
TIE_SHARE: Final = 0.02
TIE_S: Final = 0.005
"""Costs closer than these are the same: estimates are no better."""
SCATTER: Final = 0x9E37_79B1
"""2^32 over the golden ratio: multiplied by it, seeds that differ little lie far apart (Knuth, TAOCP 3, 6.4)."""


def cheapest(replicas: Sequence[View], pool: Sequence[int], ask: Ask, pricing: Pricing) -> Route:
    """The candidate of the lowest cost; among equals a draw, the less loaded the likelier.

    Promises are no limit here: passing over the one that holds the prompt, because it is late, makes others late too.
    """
    return best_of(scores(replicas, pool, ask, pricing), ask)


def best_of(terms: list[Score], ask: Ask) -> Route:
    """The one of the lowest cost of all that were scored; among equals a draw."""
    lowest = math.inf
    for score in terms:
        lowest = min(lowest, score.total_s)
    highest = lowest + max(TIE_SHARE * lowest, TIE_S)
    near = [score for score in terms if score.total_s <= highest]
    best = near[0] if len(near) == 1 else _draw(near, ask.seed)
    budget_s = ask.ttft_budget_s
    late = budget_s is not None and best.queue_s + best.prefill_s > budget_s
    why = (
        _HELD
        if ask.held
        else _ONLY
        if len(terms) == 1
        else _LATE
        if late
        else _CHEAPEST
        if len(near) == 1
        else _DRAWN
    )
    return Route(best.at, why, best.hit_tokens, terms)


def scores(replicas: Sequence[View], pool: Sequence[int], ask: Ask, pricing: Pricing) -> list[Score]:
    """What each of the pool would cost. A wait is at that replica's speed, the price of new work at the mean speed.

    Priced at its own speed, work would look dear on a slow replica even when the cache there saves most of it.
    """
    usual, usual_slope = pricing.prefill_tokens_per_s, pricing.decode_slope_s
    slowest, steepest = usual / SPREAD_MAX, usual_slope * SLOPE_SPREAD_MAX
    waits_s = speeds = 0.0
    masks, views = [], [replicas[at] for at in pool]
    for view in views:
        meter = view.meter
        speed = max(meter.prefill_tokens_per_s or usual, slowest)
        speeds += speed
        waits_s += meter.queue_tokens / speed
        masks.append(meter.mask)
    depths = pricing.index.depths(ask.blocks, masks)
    mean = speeds / len(pool)
    ttft, tpot, work = ask.weights
    price, pause = pricing.price(waits_s / len(pool), mean) + work / mean, PAUSE / mean
    tokens, block_tokens, output_tokens = ask.tokens, ask.block_tokens, ask.output_tokens
    rows = []
    for n, at in enumerate(pool):
        meter, load = views[n].meter, views[n].load
        speed = max(meter.prefill_tokens_per_s or usual, slowest)
        hit = min(depths[n] * block_tokens, tokens)
        uncached = max(1.0, tokens - meter.trust * hit)
        wait, prefill = meter.queue_tokens / speed, uncached / speed
        slope = min(max(meter.decode_slope_s or usual_slope, usual_slope / SLOPE_SPREAD_MAX), steepest)
        decode = output_tokens * slope * load
        imposed = uncached * (price + pause * load)
        share, handicap = meter.kv_share, meter.handicap
        kv = KV_BARRIER_S * share / (1.0 - share)
        total = (ttft * (wait + prefill) + tpot * decode + imposed + kv) * handicap
        rows.append(
            Score(
                at, load, queue_s=wait, prefill_s=prefill, decode_s=decode, price_s=imposed, kv_s=kv,
                handicap=handicap, total_s=total, hit_tokens=hit,
            )
        )  # fmt: skip
    return rows


def _draw(near: list[Score], seed: int) -> Score:
    weights = 0.0
    for score in near:
        weights += 1.0 / (1 + score.load)
    spot = weights * (seed * SCATTER & 0xFFFF_FFFF) / 2**32
    for score in near[:-1]:
        spot -= 1.0 / (1 + score.load)
        if spot < 0.0:
            return score
    return near[-1]
