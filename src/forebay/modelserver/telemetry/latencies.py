"""Request latencies by model: histograms, and the quantiles that Triton calls summaries."""

from collections.abc import Sequence
from typing import Final

from forebay.modelserver.models.running.call import Call
from forebay.obs.metrics import SECONDS, Histogram

FIRST_RESPONSE_MS: Final = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's histogram buckets for the time to the first response."""
QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
STEPS_PER_OCTAVE: Final = 8
"""Bucket resolution of a summary: quantiles are at most 12.5 % too large."""
OCTAVES: Final = 40
PHASES: Final = ("request", "queue", "compute_input", "compute_infer", "compute_output")


class Summary:
    """A histogram with exponential buckets, from which any quantile can be estimated."""

    __slots__ = ("_counts", "count", "sum_us")

    def __init__(self) -> None:
        self._counts = [0] * (OCTAVES * STEPS_PER_OCTAVE)
        self.count = 0
        self.sum_us = 0

    def observe(self, ns: int) -> None:
        """Record one duration."""
        us = ns // 1000
        octave = us.bit_length()
        at = 0
        if octave:
            low = 1 << (octave - 1)
            at = (octave - 1) * STEPS_PER_OCTAVE + (us - low) * STEPS_PER_OCTAVE // low
        self._counts[min(at, len(self._counts) - 1)] += 1
        self.count += 1
        self.sum_us += us

    def quantile(self, share: float) -> float:
        """Upper bound, in microseconds, of the bucket that contains this quantile; 0 without observations."""
        wanted, passed = share * self.count, 0
        for at, count in enumerate(self._counts):
            passed += count
            if count and passed >= wanted:
                octave, step = divmod(at, STEPS_PER_OCTAVE)
                return (1 << octave) * (1 + (step + 1) / STEPS_PER_OCTAVE)
        return 0.0


class Latency:
    """Latencies of one model version."""

    __slots__ = ("first_ms", "phases", "seconds")

    def __init__(self) -> None:
        self.seconds = Histogram(SECONDS)
        self.first_ms: Histogram | None = None
        """Time to the first response of decoupled models, in milliseconds."""
        self.phases: dict[str, Summary] = {}


class Latencies:
    """Latencies of all models. `summaries` and `first_responses` are enabled by `--metrics-config`."""

    def __init__(self, *, summaries: bool = False, first_responses: bool = False) -> None:
        self._summaries = summaries
        self.first_responses = first_responses
        self.known: dict[tuple[str, str], Latency] = {}

    def observe(self, model: str, version: str, call: Call, first_ns: int, end_ns: int) -> None:
        """Record an answered request; times are CLOCK_MONOTONIC."""
        latency = self.known.get((model, version))
        if latency is None:
            latency = self.known[model, version] = Latency()
        took_ns = end_ns - call.started_ns
        latency.seconds.observe(took_ns / 1e9)
        if latency.first_ms is not None:
            latency.first_ms.observe((first_ns - call.started_ns) / 1e6)
        if self._summaries:
            spent = call.spent
            queue_ns = max(0, end_ns - sum(spent) - call.queued_ns)
            computed = spent if any(spent) else ()  # an answer from the cache is no computation of 0 s
            for phase, ns in zip(PHASES, (took_ns, queue_ns, *computed), strict=False):
                latency.phases.setdefault(phase, Summary()).observe(ns)

    def watch_first_responses(self, model: str, version: str, buckets_ms: Sequence[float]) -> None:
        """Also record the model's times to first response."""
        latency = self.known.setdefault((model, version), Latency())
        if latency.first_ms is None or latency.first_ms.bounds != tuple(buckets_ms):
            latency.first_ms = Histogram(tuple(buckets_ms))

    def forget_all_but(self, served: set[tuple[str, str]]) -> None:
        """Drop models that are not served any more."""
        for key in [each for each in self.known if each not in served]:
            del self.known[key]
