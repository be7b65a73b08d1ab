"""Turns samples into a report: percentiles, rates, goodput. Pure functions over bounded arrays."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

QUANTILES = (0.50, 0.95, 0.99)
CODES_MAX = 64
"""Error codes that are counted separately; the rest counts as `other`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request. Times in seconds; `start_s` counts from the start of the run.

    `latency_s` and `ttft_s` count from when the request was due, `lag_s` is how much later it was sent.
    """

    start_s: float
    lag_s: float
    ttft_s: float
    """NaN if the response had no text."""
    decode_s: float
    """From the first piece of text to the last."""
    latency_s: float
    prompt_tokens: int
    output_tokens: int
    counted: bool
    """True: the server sent no usage, so `output_tokens` counts stream chunks instead."""


@dataclass
class Samples:
    """All responses of a run in columns (40 bytes per request), and errors by code."""

    start_s: "array[float]" = field(default_factory=lambda: array("d"))
    lag_s: "array[float]" = field(default_factory=lambda: array("d"))
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    tpot_s: "array[float]" = field(default_factory=lambda: array("d"))
    """NaN for a response with fewer than two tokens."""
    latency_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, sample: Sample) -> None:
        """Record a response."""
        self.start_s.append(sample.start_s)
        self.lag_s.append(sample.lag_s)
        self.ttft_s.append(sample.ttft_s)
        self.tpot_s.append(tpot_s(sample))
        self.latency_s.append(sample.latency_s)
        self.prompt_tokens += sample.prompt_tokens
        self.output_tokens += sample.output_tokens
        self.counted += sample.counted

    def fail(self, code: str) -> None:
        """Record a failed request."""
        known = code in self.errors or len(self.errors) < CODES_MAX
        self.errors[code if known else "other"] += 1

    @property
    def answered(self) -> int:
        """Number of successful requests."""
        return len(self.latency_s)

    @property
    def failed(self) -> int:
        """Number of failed requests."""
        return self.errors.total()


def tpot_s(sample: Sample) -> float:
    """Time per output token after the first; NaN without a second one."""
    return sample.decode_s / (sample.output_tokens - 1) if sample.output_tokens > 1 else math.nan


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted values, with linear interpolation."""
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Spread(msgspec.Struct, frozen=True):
    """The distribution of a quantity, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    count: int


def spread(values_s: Iterable[float]) -> Spread | None:
    """Mean, percentiles and maximum of values in seconds; None if there are none."""
    ordered = sorted(v for v in values_s if not math.isnan(v))
    if not ordered:
        return None
    p50, p95, p99 = (round(quantile(ordered, q) * 1000, 3) for q in QUANTILES)
    mean = round(math.fsum(ordered) / len(ordered) * 1000, 3)
    return Spread(mean, p50, p95, p99, round(ordered[-1] * 1000, 3), len(ordered))


class Slo(msgspec.Struct, frozen=True):
    """Limits that a good request must meet, in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def asked(self) -> bool:
        """Whether there is any limit."""
        return any(v is not None for v in (self.ttft_ms, self.tpot_ms, self.e2e_ms))


def good(samples: Samples, slo: Slo) -> int:
    """How many requests met every limit. A response of one token meets a limit on TPOT."""
    limits = [
        (column, limit_ms / 1000)
        for column, limit_ms in (
            (samples.ttft_s, slo.ttft_ms),
            (samples.tpot_s, slo.tpot_ms),
            (samples.latency_s, slo.e2e_ms),
        )
        if limit_ms is not None
    ]
    return sum(all(not column[i] > limit for column, limit in limits) for i in range(samples.answered))


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met the SLO: errors count against it."""

    slo: Slo
    requests: int
    share: float
    requests_per_s: float


class Report(msgspec.Struct, frozen=True):
    """The output of `--json`. `tokens_from` is `usage` (counted by the server), `chunks`, or `mixed`."""

    url: str
    model: str
    task: str
    load: str
    settings: dict[str, int | float | str | bool | None]
    duration_s: float
    requests: int
    answered: int
    errors: dict[str, int]
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    tokens_from: str
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    sent_late_ms: Spread | None
    """Open loop only: how late the client sent requests; this is part of the latencies."""
    goodput: Goodput | None
    interrupted: bool


class About(msgspec.Struct, frozen=True):
    """The part of a report that is known before the run."""

    url: str
    model: str
    task: str
    load: str
    settings: dict[str, int | float | str | bool | None]
    streaming: bool
    open_loop: bool
    slo: Slo


def report(about: About, samples: Samples, duration_s: float, interrupted: bool) -> Report:
    """The report of a run that took `duration_s`."""
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    total = samples.answered + samples.failed
    goodput = None
    if about.slo.asked:
        kept = good(samples, about.slo)
        goodput = Goodput(about.slo, kept, round(kept / total, 5) if total else 0.0, round(kept * per_s, 3))
    return Report(
        url=about.url,
        model=about.model,
        task=about.task,
        load=about.load,
        settings=about.settings,
        duration_s=round(duration_s, 3),
        requests=total,
        answered=samples.answered,
        errors=dict(sorted(samples.errors.items())),
        requests_per_s=round(samples.answered * per_s, 3),
        prompt_tokens=samples.prompt_tokens,
        output_tokens=samples.output_tokens,
        output_tokens_per_s=round(samples.output_tokens * per_s, 2),
        prompt_tokens_per_s=round(samples.prompt_tokens * per_s, 2),
        tokens_from={0: "usage", samples.answered: "chunks"}.get(samples.counted, "mixed"),
        ttft_ms=spread(samples.ttft_s) if about.streaming else None,
        tpot_ms=spread(samples.tpot_s) if about.streaming else None,
        e2e_ms=spread(samples.latency_s),
        sent_late_ms=spread(samples.lag_s) if about.open_loop else None,
        goodput=goodput,
        interrupted=interrupted,
    )
