"""Custom metrics of a Python model. They are kept in its process; the server fetches them for each scrape."""

import re
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import pairwise
from time import monotonic_ns
from typing import ClassVar, Final
from weakref import WeakValueDictionary

from forebay.engines.tensor.measures import FAMILIES_MAX, SERIES_MAX, Family, Labels, Measure, Series
from forebay.engines.tensor.python.tensors import TritonModelException, as_text

LABELS_MAX: Final = 16
CHARS_MAX: Final = 256
"""Of a metric name, label name or label value."""
HELP_CHARS_MAX: Final = 1000
BUCKETS_MAX: Final = 200
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class MetricKind(Enum):
    """Type of a metric."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


_MEASURES: Final = {
    MetricKind.COUNTER: Measure.COUNTER,
    MetricKind.GAUGE: Measure.GAUGE,
    MetricKind.HISTOGRAM: Measure.HISTOGRAM,
}


class _Cell:
    """The values of one metric."""

    __slots__ = ("bounds", "counts", "labels", "lock", "set_ns", "value")

    def __init__(self, labels: Labels, bounds: tuple[float, ...], buckets: int) -> None:
        self.labels, self.bounds = labels, bounds
        self.counts = [0] * buckets
        self.lock = threading.Lock()
        self.value = 0.0
        self.set_ns = 0

    def series(self) -> Series:
        with self.lock:
            return Series(self.labels, self.value, self.set_ns, self.bounds, tuple(self.counts))


class _Registered:
    """State shared by all family objects of one name. It exists as long as one of them, or a metric of it, does."""

    __slots__ = ("__weakref__", "cells", "help", "kind", "name")

    def __init__(self, name: str, help: str, kind: MetricKind) -> None:
        self.name, self.help, self.kind = name, help, kind
        self.cells: dict[Labels, _Cell] = {}


class Metric:
    """One set of labels of a family. Objects with the same labels share their values."""

    __slots__ = ("_cell", "_family")

    def __init__(self, family: _Registered, cell: _Cell) -> None:
        self._family, self._cell = family, cell

    def increment(self, value: float) -> None:
        """Add to a counter (not negative) or a gauge."""
        kind, number = self._family.kind, float(value)
        if kind is MetricKind.HISTOGRAM or (kind is MetricKind.COUNTER and not number >= 0):
            raise TritonModelException(f"Failed to increment metric value: {kind.name} by {value}")
        cell = self._cell
        with cell.lock:
            cell.value += number

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._require(MetricKind.GAUGE, "set", "Set")
        cell = self._cell
        with cell.lock:
            cell.value, cell.set_ns = float(value), monotonic_ns()

    def observe(self, value: float) -> None:
        """Record an observation in a histogram."""
        self._require(MetricKind.HISTOGRAM, "observe", "Observe")
        cell, number = self._cell, float(value)
        with cell.lock:
            cell.value += number
            cell.counts[bisect_left(cell.bounds, number)] += 1

    def value(self) -> float:
        """The current value of a counter or gauge in this instance."""
        if self._family.kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to get metric value: HISTOGRAM does not support Value")
        return self._cell.value

    def _require(self, kind: MetricKind, verb: str, name: str) -> None:
        if self._family.kind is not kind:
            text = f"Failed to {verb} metric value: {self._family.kind.name} does not support {name}"
            raise TritonModelException(text)


_lock = threading.Lock()
_families: WeakValueDictionary[str, _Registered] = WeakValueDictionary()
"""Families of this process, which has one model."""


class MetricFamily:
    """Metrics with one name."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        name, description = as_text(name, "name"), as_text(description, "description")
        if not isinstance(kind, MetricKind) or len(name) > CHARS_MAX or not _NAME.fullmatch(name):
            raise TritonModelException(f"Error when creating MetricFamily: '{name[:CHARS_MAX]}' of kind {kind}")
        with _lock:
            family = _families.get(name)
            if family is None:
                if len(_families) >= FAMILIES_MAX:
                    raise TritonModelException(f"Error when creating MetricFamily: there are {FAMILIES_MAX} already")
                family = _families[name] = _Registered(name, description[:HELP_CHARS_MAX], kind)
        if family.kind is not kind:
            raise TritonModelException(
                f"Error when creating MetricFamily: '{name}' is there as {family.kind.name}, not {kind.name}"
            )
        self._family = family

    def Metric(  # noqa: N802 - the name that models call
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """A metric with these labels; `buckets` (ascending upper bounds) are for histograms."""
        family = self._family
        if (family.kind is MetricKind.HISTOGRAM) != (buckets is not None):
            raise TritonModelException(
                "Error when creating Metric: a histogram has buckets, and nothing else has any."
            )
        key, bounds = _labels(labels or {}), _bounds(buckets or ())
        with _lock:
            cell = family.cells.get(key)
            if cell is None:
                if sum(len(each.cells) for each in _families.values()) >= SERIES_MAX:
                    raise TritonModelException(f"Error when creating Metric: there are {SERIES_MAX} already")
                number = len(bounds) + 1 if family.kind is MetricKind.HISTOGRAM else 0
                cell = family.cells[key] = _Cell(key, bounds, number)
        return Metric(family, cell)


def measured() -> tuple[Family, ...]:
    """Current values of all metrics of this process, by name."""
    with _lock:
        found = [(each, list(each.cells.values())) for each in _families.values()]
    return tuple(
        Family(each.name, _MEASURES[each.kind], each.help, tuple(cell.series() for cell in cells))
        for each, cells in sorted(found, key=lambda pair: pair[0].name)
    )


def _labels(given: Mapping[str, str]) -> Labels:
    if not isinstance(given, Mapping):
        raise TritonModelException("Error when creating Metric: labels must be a dictionary.")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str) or not _LABEL.fullmatch(name):
            raise TritonModelException(f"Error when creating Metric: label {name!r}: {value!r}")
        if max(len(name), len(value)) > CHARS_MAX:
            raise TritonModelException(f"Error when creating Metric: label '{name[:CHARS_MAX]}' is too long")
    if len(given) > LABELS_MAX:
        raise TritonModelException(f"Error when creating Metric: more than {LABELS_MAX} labels")
    return tuple(sorted((as_text(name, "name"), as_text(value, "value")) for name, value in given.items()))


def _bounds(given: Sequence[float]) -> tuple[float, ...]:
    bounds = tuple(map(float, given))
    if len(bounds) > BUCKETS_MAX or any(not lower < upper for lower, upper in pairwise(bounds)):
        raise TritonModelException("Error when creating Metric: buckets must ascend, and be no more than 200")
    return bounds
