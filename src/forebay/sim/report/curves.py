"""Condensed results of a replay: distributions and time series instead of every request."""

from itertools import pairwise
from math import ceil
from typing import Final, NamedTuple

import numpy as np

from forebay.core.errors import OK
from forebay.sim.replay.cluster import Promise
from forebay.sim.replay.outcome import Outcome

Points = tuple[tuple[float, float], ...]
CDF_POINTS: Final = 200
SIZES_MAX: Final = 400
BUCKETS_MAX: Final = 60
BUCKET_REQUESTS_MIN: Final = 10
"""With fewer requests per bucket on average, rates would be noise."""


class Curves(NamedTuple):
    """Curves of one replay."""

    ttft: Points
    """CDF of the time to first token, seconds, over all requests."""
    tpot: Points
    """CDF of the mean time per token after the first, seconds, over all requests."""
    arrived: Points
    """Time from the start, seconds, and arrivals per second."""
    good: Points
    """Time from the start, seconds, and arrivals per second that were answered within the limits."""
    computed: tuple[int, ...]
    """Prompt tokens computed by each replica, descending. Unlike busy time, this distinguishes replicas that are
    never idle."""
    replicas: Points = ()
    """Time from the start, seconds, and replicas that occupy GPUs from then on."""


def curves(outcome: Outcome, slo: Promise) -> Curves:
    """The curves of a replay of at least one request."""
    arrived, first, ended = (np.array(x) for x in (outcome.arrived_at, outcome.first_at, outcome.ended_at))
    ok = np.array([code == OK for code in outcome.codes], dtype=bool)
    tpot = (ended - first) / np.maximum(np.array(outcome.output_tokens) - 1, 1)
    good = ok & (first - arrived <= slo.ttft_s) & (tpot <= slo.tpot_s)
    span_s = max(float(arrived[-1]), 1e-9)
    buckets = max(1, min(BUCKETS_MAX, len(arrived) // BUCKET_REQUESTS_MIN))
    return Curves(
        ttft=_cdf((first - arrived)[ok], len(arrived)),
        tpot=_cdf(tpot[ok], len(arrived)),
        arrived=_per_s(arrived, span_s, buckets),
        good=_per_s(arrived[good], span_s, buckets),
        computed=tuple(sorted((each.prefilled_tokens for each in outcome.replicas), reverse=True)),
        replicas=_sizes(outcome),
    )


def _sizes(outcome: Outcome) -> Points:
    """Every change, or if there are many the maximum per interval."""
    points = [(size.at_s, float(size.there)) for size in outcome.sizes]
    if len(points) > SIZES_MAX:
        stretch_s = outcome.lasted_s / SIZES_MAX
        most = [0.0] * SIZES_MAX
        for (at_s, count), (until_s, _) in pairwise([*points, (outcome.lasted_s, 0.0)]):
            for place in range(int(at_s / stretch_s), min(ceil(until_s / stretch_s), SIZES_MAX)):
                most[place] = max(most[place], count)
        points = [(place * stretch_s, count) for place, count in enumerate(most)]
    return (*points, (outcome.lasted_s, points[-1][1])) if points else ()


def _cdf(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", total: int) -> Points:
    ordered = np.sort(values)
    if not len(ordered):
        return ()
    at = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), CDF_POINTS)).astype(int))
    return tuple((float(ordered[place]), (int(place) + 1) / total) for place in at)


def _per_s(at_s: "np.ndarray[tuple[int], np.dtype[np.float64]]", span_s: float, buckets: int) -> Points:
    counts, edges = np.histogram(at_s, bins=buckets, range=(0, span_s))
    width_s = span_s / buckets
    return tuple((float(edge), float(count) / width_s) for edge, count in zip(edges, counts, strict=False))
