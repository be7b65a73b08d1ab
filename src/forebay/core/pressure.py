"""Each gateway's traffic counters per model, for autoscaling, and the differences between two readings. Pure.

Counters only grow while a gateway runs, so a lost response loses nothing: control takes differences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean


@dataclass(frozen=True, slots=True)
class TrafficCounters:
    """Traffic of one model at one gateway since its start; also the sum over gateways, or the difference over a
    period."""

    arrivals: int = 0
    """Requests received, including those that were rejected or fell back to another model."""
    refused: int = 0
    """Of these, rejected because of a full queue, a timeout or a missing replica."""
    prompt_tokens: int = 0
    """Actual count for requests that have ended, an estimate for the others."""
    completions: int = 0
    """Requests that succeeded."""
    output_tokens: int = 0
    stay_s: float = 0.0
    """Integral over time of the number of requests waiting or in flight: the total time of all requests."""
    ttft: tuple[int, ...] = ()
    """Times to first token by bucket of the gateway's histogram, not cumulative; for models without tokens, times of
    whole responses."""
    tpot: tuple[int, ...] = ()
    waiting: int = 0
    """Requests waiting now; this field and the following ones are gauges, not counters."""
    waiting_tokens: int = 0
    """Estimated prompt tokens of those."""
    queued_tokens: int = 0
    """Prompt tokens that the gateway estimates to be queued inside all replicas, whoever sent them."""
    predicted_ttft_s: float | None = None
    """Predicted time to first token of a typical prompt that arrives now; None: unknown, or an older gateway."""
    predicted_tpot_s: float | None = None
    """Predicted time per output token after the first."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """A gateway's response to `GET /pressure` on its private port."""

    instance: str
    """Differs between starts of a gateway; counters restart with it."""
    age_s: float
    """Time since that start."""
    models: Mapping[str, TrafficCounters] = field(default_factory=dict)


def difference(before: TrafficCounters, now: TrafficCounters) -> TrafficCounters:
    """The difference between two readings of one gateway. Clamped at 0: estimates may have shrunk."""
    return TrafficCounters(
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


def sum_over_gateways(parts: Iterable[TrafficCounters]) -> TrafficCounters:
    """The sum over several gateways. Each of them estimates the queues inside replicas, so the maximum is used there.

    Predictions are averaged, weighted by each gateway's arrivals plus one, so that idle gateways count too.
    """
    all_parts = tuple(parts)
    return TrafficCounters(
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
    """Weighted mean of the known values."""
    known = [(value, weight) for value, weight in weighed if value is not None]
    return fmean([value for value, _ in known], [weight for _, weight in known]) if known else None


def _grown(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(0, b - a) for a, b in zip_longest(before, now, fillvalue=0))


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the observations lie, in the unit of `bounds`; None: there are no
    observations.

    Linear interpolation within a bucket, as Prometheus' `histogram_quantile`; above the last bound, that bound.
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
    """How many observations are above a limit; within a bucket they are assumed to be evenly distributed."""
    several, low = 0.0, 0.0
    for bound, count in zip_longest(bounds, counts):
        if bound is None or low >= limit:
            several += count
        elif limit < bound:
            several += count * (bound - limit) / (bound - low)
        low = low if bound is None else bound
    return round(several)
