"""Metrics of a Python model's own: kept in its process, where the model can read them."""

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar

from forebay.engines.tensor.python.tensors import TritonModelException


class MetricKind(Enum):
    """What a metric counts."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric:
    """One set of labels of a family."""

    def __init__(self, kind: MetricKind, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self.kind, self.labels, self.buckets = kind, dict(labels), tuple(buckets)
        self.counts = [0] * (len(self.buckets) + 1)
        self._lock = threading.Lock()
        self._value = 0.0

    def increment(self, value: float) -> None:
        """Add to a counter (not below 0) or a gauge."""
        if self.kind is MetricKind.HISTOGRAM or (self.kind is MetricKind.COUNTER and value < 0):
            raise TritonModelException(f"Failed to increment metric value: {self.kind.name} by {value}")
        with self._lock:
            self._value += value

    def set(self, value: float) -> None:
        """Set a gauge."""
        if self.kind is not MetricKind.GAUGE:
            raise TritonModelException(f"Failed to set metric value: {self.kind.name} does not support Set")
        with self._lock:
            self._value = float(value)

    def observe(self, value: float) -> None:
        """Note a value in a histogram."""
        if self.kind is not MetricKind.HISTOGRAM:
            raise TritonModelException(f"Failed to observe metric value: {self.kind.name} does not support Observe")
        with self._lock:
            self._value += value
            self.counts[bisect_left(self.buckets, value)] += 1

    def value(self) -> float:
        """What a counter or gauge stands at."""
        if self.kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to get metric value: HISTOGRAM does not support Value")
        return self._value


class MetricFamily:
    """Metrics of one name."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metrics: list[Metric] = []

    def Metric(  # noqa: N802 - the name that models call
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """A metric with these labels; `buckets` (upper bounds, ascending) belong to a histogram."""
        if (self.kind is MetricKind.HISTOGRAM) != (buckets is not None):
            raise TritonModelException(
                "Error when creating Metric: a histogram has buckets, and nothing else has any."
            )
        made = Metric(self.kind, labels or {}, buckets or ())
        self.metrics.append(made)
        return made
