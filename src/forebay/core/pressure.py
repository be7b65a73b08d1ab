"""What gateways count of each model for scaling, and what has come since the last look. Pure.

Counts only grow while a gateway runs, so that an answer that is lost loses nothing: control takes differences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Pressed:
    """What one model was asked for, by one gateway since its start; or the same of several, or of a while."""

    arrivals: int = 0
    """Requests that came, also those that were refused or went on to another model."""
    refused: int = 0
    """Of these, for want of room or time, or of a replica."""
    prompt_tokens: int = 0
    """Of those that have ended, and an estimate of the others'."""
    completions: int = 0
    """Requests that were answered well."""
    output_tokens: int = 0
    stay_s: float = 0.0
    """Integral of the number of requests that wait or are under way over time: what all of them together spent."""
    ttft: tuple[int, ...] = ()
    """First tokens by the buckets of the gateway's histogram, each counted once; of a model that makes none, whole
    answers."""
    tpot: tuple[int, ...] = ()
    waiting: int = 0
    """Requests that wait now; from here on nothing grows with time."""
    waiting_tokens: int = 0
    """Estimated prompt tokens of those."""
    queued_tokens: int = 0
    """Prompt tokens that the gateway believes to wait inside all replicas, whoever sent them."""
    predicted_ttft_s: float | None = None
    """What the first token of a usual prompt would take if it came now; None: not known, or an older gateway."""
    predicted_tpot_s: float | None = None
    """What each token after it would take."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """A gateway's answer to `GET /pressure` on its private port."""

    instance: str
    """Differs from start to start of a gateway; counts begin anew with it."""
    age_s: float
    """Since that start."""
    models: Mapping[str, Pressed] = field(default_factory=dict)


def since(before: Pressed, now: Pressed) -> Pressed:
    """What has come between two looks at one gateway. Nothing is below zero: estimates may have shrunk."""
    return Pressed(
        max(0, now.arrivals - before.arrivals),
        max(0, now.refused - before.refused),
        max(0, now.prompt_tokens - before.prompt_tokens),
        max(0, now.completions - before.completions),
        max(0, now.output_tokens - before.output_tokens),
        max(0.0, now.stay_s - before.stay_s),
        _grown(before.ttft, now.ttft),
        _grown(before.tpot, now.tpot),
        now.waiting,
        now.waiting_tokens,
        now.queued_tokens,
        now.predicted_ttft_s,
        now.predicted_tpot_s,
    )


def total(parts: Iterable[Pressed]) -> Pressed:
    """Of several gateways together. What waits inside replicas is believed by each of them, so the most counts.

    What they predict is a mean by the requests that came to each, and one more: those of a quiet while count too.
    """
    all_parts = tuple(parts)
    return Pressed(
        sum(part.arrivals for part in all_parts),
        sum(part.refused for part in all_parts),
        sum(part.prompt_tokens for part in all_parts),
        sum(part.completions for part in all_parts),
        sum(part.output_tokens for part in all_parts),
        sum(part.stay_s for part in all_parts),
        tuple(map(sum, zip_longest(*(part.ttft for part in all_parts), fillvalue=0))),
        tuple(map(sum, zip_longest(*(part.tpot for part in all_parts), fillvalue=0))),
        sum(part.waiting for part in all_parts),
        sum(part.waiting_tokens for part in all_parts),
        max((part.queued_tokens for part in all_parts), default=0),
        _mean([(part.predicted_ttft_s, 1 + part.arrivals) for part in all_parts]),
        _mean([(part.predicted_tpot_s, 1 + part.arrivals) for part in all_parts]),
    )


def _mean(weighed: Iterable[tuple[float | None, int]]) -> float | None:
    """Of the values that are known, by their weights."""
    known = [(value, weight) for value, weight in weighed if value is not None]
    return fmean([value for value, _ in known], [weight for _, weight in known]) if known else None


def _grown(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(0, b - a) for a, b in zip_longest(before, now, fillvalue=0))


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the observations lie, in the unit of `bounds`; None: there were none.

    Straight between the bounds of a bucket, as Prometheus' `histogram_quantile`; above the last bound, that bound.
    """
    wanted, low = share * sum(counts), 0.0
    if not wanted:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        if wanted <= count:
            return low + (bound - low) * wanted / count
        wanted -= count
        low = bound
    return low


def above(bounds: Sequence[float], counts: Sequence[int], limit: float) -> int:
    """How many of the observations are above a limit; within a bucket they are taken to lie evenly."""
    several, low = 0.0, 0.0
    for bound, count in zip_longest(bounds, counts):
        if bound is None or low >= limit:
            several += count
        elif limit < bound:
            several += count * (bound - limit) / (bound - low)
        low = low if bound is None else bound
    return round(several)
