"""Effect sizes of an A/B test: how different the arms are, with intervals that are valid at any stopping time.

For rates it inverts the exact tests of `odds`, in steps of a quarter of an octave. For times and scores it is an
asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory
and asymptotic confidence sequences", 2024, theorem 2.2) of the weighted mean of differences within blocks: a
finite-sample one would need a bound on values that have none. docs/rollouts.md has its measured coverage.
"""

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.core.rollout import odds, ranks
from forebay.core.rollout.values import Rate, Rules, Score, Shift, State

BLOCKS_TIGHT: Final = 200
"""The number of blocks, or pairs, for which the interval is tightest."""
BLOCKS_MIN: Final = 50
"""With fewer the central limit theorem does not apply: no bounds."""


class Effect(NamedTuple):
    """The canary's effect relative to the stable arm."""

    metric: str
    kind: str
    """odds ratio, ratio (of geometric means), difference (of means)"""
    estimate: float
    """nan if unknown."""
    low: float
    high: float


def effects(rules: Rules, state: State, alpha: float = 0.05) -> tuple[Effect, ...]:
    """The effect on each metric; each interval misses the truth at any time with probability at most alpha."""
    return tuple(_effects(rules, state, alpha))


def _effects(rules: Rules, state: State, alpha: float) -> Iterator[Effect]:
    for metric in rules.metrics:
        if isinstance(metric, Rate):
            seen = state.rates[metric.name].odds
            bounds = odds.interval(seen, metric.ratio, alpha)
            yield Effect(metric.name, "odds ratio", odds.likely(seen, metric.ratio), *bounds)
        elif isinstance(metric, Score):
            shift = state.scores[metric.name].shift
            yield Effect(metric.name, "difference", shift.mean, *_bounds(shift, 1.0, alpha))
        else:
            known = state.times[metric.name]
            low, high = _bounds(known.shift, ranks.stretch(known.swings), alpha)
            yield Effect(metric.name, "ratio", math.exp(known.shift.mean), math.exp(low), math.exp(high))


def _bounds(shift: Shift, stretch: float, alpha: float) -> tuple[float, float]:
    """Bounds of the mean's interval; infinite before BLOCKS_MIN blocks' worth of weight."""
    blocks = shift.weight**2 / shift.squares if shift.squares else 0.0
    if blocks < BLOCKS_MIN:
        return -math.inf, math.inf
    mean = shift.mean
    squares = shift.squares_dd - 2 * mean * shift.squares_d + mean * mean * shift.squares
    variance = stretch * max(0.0, squares) / shift.weight**2
    log = -2 * math.log(alpha)
    ripe = blocks / BLOCKS_TIGHT * (log + math.log(1 + log))
    half = math.sqrt(variance * (1 + 1 / ripe) * (math.log1p(ripe) + log))
    return mean - half, mean + half
