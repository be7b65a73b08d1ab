"""Evidence about the odds ratio of events in two arms, whatever the event rate is and however it changes.

Given a block of requests that differ only in their arm, and its number of events, the canary's events follow Fisher's
noncentral hypergeometric distribution, which depends on the odds ratio only (R. A. Fisher, "The logic of inductive
inference", 1935). A product of such likelihoods over blocks, at one odds ratio over that at another, is a nonnegative
martingale with mean 1 under the latter; so is a mixture of them (Robbins, "Statistical methods related to the law of
the iterated logarithm", 1970). By Ville's inequality it ever exceeds 1/p with probability at most p. The likelihood
ratio is monotone in the events, so that "at most this odds ratio" is rejected as a whole.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from forebay.core.rollout.values import Cell

STEP: Final = math.log(2) / 4
SIDE: Final = 16
"""The grid: odds ratios from a sixteenth of the tolerated one to sixteen times it, in quarters of an octave."""
NOTHING: Final = (0.0,) * (2 * SIDE + 1)
FLOOR_RATIOS: Final = (0.02, 0.1, 0.25, 0.5, 0.75, 1.5, 2.0, 4.0, 8.0, 32.0)
"""Alternative shares, as multiples of the floor, that are tested against it."""
SHARE_MAX: Final = 0.99


class Evidence(NamedTuple):
    """Log e-values: of the mixture, which counts, and of its best component, which shows how fast it grows."""

    log: float
    best: float


def mixed(logs: Sequence[float]) -> Evidence:
    """The mean of e-values, which is an e-value too."""
    best = max(logs)
    return Evidence(best + math.log(math.fsum(math.exp(log - best) for log in logs) / len(logs)), best)


def either(one: Evidence, other: Evidence) -> Evidence:
    """Evidence against a null hypothesis that both e-values test: their mean."""
    return Evidence(mixed((one.log, other.log)).log, max(one.best, other.best))


def both(one: Evidence, other: Evidence) -> Evidence:
    """Evidence against "the first or the second": both must be rejected."""
    return min(one, other)


def with_block(odds: tuple[float, ...], block: Cell, tolerated: float) -> tuple[float, ...]:
    """The log likelihoods at `tolerated` times the grid, after one more block."""
    events = block.stable_events + block.canary_events
    low = max(0, events - block.stable)
    high = min(events, block.canary)
    if low == high:
        return odds
    ways = [_log_ways(block.canary, x) + _log_ways(block.stable, events - x) for x in range(low, high + 1)]
    most = max(ways)
    found = []
    for index, log in enumerate(odds):
        slope = math.log(tolerated) + (index - SIDE) * STEP
        peak = most + slope * (high if slope > 0 else low)
        total = math.fsum(math.exp(way + slope * x - peak) for x, way in enumerate(ways, low))
        found.append(log + slope * block.canary_events - peak - math.log(total))
    return tuple(found)


def surprise(block: Cell) -> float | None:
    """The excess of the canary's events over its share, in standard deviations; None without events."""
    events, several = block.stable_events + block.canary_events, block.stable + block.canary
    if not 0 < events < several:
        return None
    share = block.canary / several
    variance = events * share * (1 - share) * (several - events) / (several - 1)
    return (block.canary_events - events * share) / math.sqrt(variance)


def above(odds: Sequence[float]) -> Evidence:
    """Evidence against "the odds ratio is at most the tolerated one"."""
    return mixed([log - odds[SIDE] for log in odds[SIDE + 1 :]])


def below(odds: Sequence[float]) -> Evidence:
    """Evidence against "the odds ratio is at least the tolerated one"."""
    return mixed([log - odds[SIDE] for log in odds[:SIDE]])


def floor_evidence(canary: int, events: int, floor: float) -> tuple[Evidence, Evidence]:
    """Evidence against "the canary's share of events is at most `floor`", and against "at least".

    Likelihood ratios at a few shares; equivalently, bets Π (1 + λ(x - floor)) at a few λ. Exact as long as each
    request's probability, given those before, satisfies the null hypothesis; it may vary between requests.
    """
    logs = []
    for ratio in FLOOR_RATIOS:
        share = min(floor * ratio, max(SHARE_MAX, floor))
        logs.append(events * math.log(share / floor) + (canary - events) * math.log((1 - share) / (1 - floor)))
    split = sum(ratio < 1 for ratio in FLOOR_RATIOS)
    return mixed(logs[split:]), mixed(logs[:split])


def likely(odds: Sequence[float], tolerated: float) -> float:
    """The odds ratio of the grid with the highest likelihood; nan without observations."""
    if not any(odds):
        return math.nan
    return tolerated * math.exp((max(range(len(odds)), key=odds.__getitem__) - SIDE) * STEP)


def interval(odds: Sequence[float], tolerated: float, alpha: float) -> tuple[float, float]:
    """The odds ratios that are not rejected: an always-valid interval at level 1 - alpha; 0 and inf: no bound."""
    enough = math.log(2 / alpha)
    low, high = 0, len(odds) - 1
    while low < high and mixed([log - odds[low] for log in odds[low + 1 :]]).log >= enough:
        low += 1
    while high > low and mixed([log - odds[high] for log in odds[:high]]).log >= enough:
        high -= 1
    from_, to = (tolerated * math.exp((index - SIDE) * STEP) for index in (low - 1, high + 1))
    return (from_ if low else 0.0), (to if high < len(odds) - 1 else math.inf)


def _log_ways(of: int, some: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)
