"""Summary statistics of a workload."""

from collections.abc import Sequence
from itertools import pairwise
from math import floor, fsum, sqrt
from typing import NamedTuple

from forebay.sim.load.columns import Columns, columns
from forebay.sim.load.values import Workload


class Spread(NamedTuple):
    """Distribution of a number of tokens."""

    p50: float
    p95: float
    mean: float


class Description(NamedTuple):
    """Statistics of a workload of at least one request."""

    requests: int
    span_s: float
    """From time 0 to the last request."""
    rate_per_s: float
    """Over the span; 0 if that is 0."""
    gap_cv: float
    """Coefficient of variation of the times between requests: 1 for a Poisson process."""
    prompt_tokens: Spread
    output_tokens: Spread
    hit_share: float | None
    """Share of prompt tokens that an unbounded cache would hold; None: prompts are unknown."""
    tenants: int
    """Number of tenants; 0: none are named."""


def describe(workload: Workload) -> Description:
    """Statistics of a workload. Raises ValueError if it is empty."""
    requests = columns(workload.arrivals)
    count = len(requests)
    if not count:
        raise ValueError(f"{workload.name}: there are no requests")
    span_s = requests.at_s[-1]
    return Description(
        requests=count,
        span_s=span_s,
        rate_per_s=count / span_s if span_s else 0.0,
        gap_cv=_variation([after - before for before, after in pairwise(requests.at_s)]),
        prompt_tokens=_spread(requests.prompt_tokens),
        output_tokens=_spread(requests.output_tokens),
        hit_share=hit_share(requests, workload.block_tokens) if requests.blocks else None,
        tenants=len(set(requests.tenants)),
    )


def hit_share(requests: Columns, block_tokens: int) -> float:
    """Share of prompt tokens that a single unbounded cache has seen before: an upper bound for every real cache."""
    seen: set[int] = set()
    tokens = 0
    for blocks, prompt_tokens in zip(requests.blocks, requests.prompt_tokens, strict=True):
        held = 0
        for block in blocks:
            if block not in seen:
                break
            held += 1
        seen.update(blocks[held:])
        tokens += min(held * block_tokens, prompt_tokens)
    return tokens / sum(requests.prompt_tokens)


def _variation(values: Sequence[float]) -> float:
    """Coefficient of variation; 0 without variation."""
    mean = fsum(values) / len(values) if values else 0.0
    return sqrt(fsum((value - mean) ** 2 for value in values) / len(values)) / mean if mean else 0.0


def _spread(tokens: Sequence[int]) -> Spread:
    ordered = sorted(tokens)
    return Spread(_quantile(ordered, 0.5), _quantile(ordered, 0.95), sum(ordered) / len(ordered))


def _quantile(ordered: Sequence[int], q: float) -> float:
    """Linear interpolation."""
    place = q * (len(ordered) - 1)
    low = floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
