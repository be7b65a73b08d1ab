"""Custom metrics of models: values sent by their processes, and how those of several processes are merged.

Series of a family are identified by their labels. The same series of several processes is merged into one: counters
and histograms are added, and of a gauge the value set last wins, as if all had written to one.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, runtime_checkable

FAMILIES_MAX: Final = 100
"""Families per model version."""
SERIES_MAX: Final = 1000
"""Series per model version, over all families: each is kept and read with every scrape."""
MICRO_BATCH_ROWS: Final = "forebay_modelserver_micro_batch_rows"
"""A gauge of backends, not of a model's own; labels: model, version, and bytes of a row, fewer than that."""

Labels = tuple[tuple[str, str], ...]


class Measure(StrEnum):
    """Metric type; values are those of the exposition format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Series(NamedTuple):
    """Values for one set of labels, which are sorted."""

    labels: Labels
    value: float
    """Of a histogram: the sum of its observations."""
    set_ns: int = 0
    """When a gauge was set, CLOCK_MONOTONIC; 0: it was only incremented."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending."""
    counts: tuple[int, ...] = ()
    """Observations in each bucket; the last exceeds all bounds."""


class Family(NamedTuple):
    """All series of one name."""

    name: str
    kind: Measure
    help: str
    series: tuple[Series, ...]


@runtime_checkable
class Measuring(Protocol):
    """A backend whose model may have custom metrics."""

    def measured(self) -> tuple[Family, ...]:
        """Their current values. Called in any thread, also while the model runs."""


class Ledger:
    """Custom metrics of all processes of one model version, including ended ones."""

    __slots__ = ("_now", "_past")

    def __init__(self) -> None:
        self._now: dict[int, tuple[Family, ...]] = {}
        self._past: tuple[Family, ...] = ()

    def hear(self, process: int, families: tuple[Family, ...]) -> None:
        """Update the metrics of a process."""
        self._now[process] = tuple(map(_whole, families[:FAMILIES_MAX]))

    def end(self, process: int) -> None:
        """A process has ended: its counters and histograms are kept, its gauges dropped."""
        gone = self._now.pop(process, ())
        kept = [family for family in gone if family.kind is not Measure.GAUGE]
        if kept:
            self._past = merged((*self._past, *kept))

    def families(self) -> tuple[Family, ...]:
        """The merged metrics."""
        return merged((*self._past, *(family for process in sorted(self._now) for family in self._now[process])))


def merged(families: Iterable[Family], *, series_max: int = SERIES_MAX) -> tuple[Family, ...]:
    """Merge into one family per name and one series per set of labels, in order of appearance.

    The first occurrence of a name defines its type and buckets: others that differ are dropped, as is everything
    beyond `series_max`.
    """
    firsts: dict[str, Family] = {}
    found: dict[str, dict[Labels, Series]] = {}
    number = 0
    for family in families:
        first = firsts.setdefault(family.name, family)
        into = found.setdefault(family.name, {})
        if first.kind is not family.kind:
            continue
        for series in family.series:
            before = into.get(series.labels)
            if before is not None:
                into[series.labels] = _together(family.kind, before, series)
            elif number < series_max:
                number += 1
                into[series.labels] = series
    return tuple(first._replace(series=tuple(found[name].values())) for name, first in firsts.items())


def _whole(family: Family) -> Family:
    """Drop malformed series and those beyond the limit."""
    more = 1 if family.kind is Measure.HISTOGRAM else 0
    series = family.series[:SERIES_MAX]
    return family._replace(series=tuple(each for each in series if len(each.counts) == len(each.bounds) + more))


def _together(kind: Measure, first: Series, second: Series) -> Series:
    if kind is Measure.GAUGE and (first.set_ns or second.set_ns):
        return max(first, second, key=lambda series: series.set_ns)
    if first.bounds != second.bounds:
        return first
    counts = tuple(map(sum, zip(first.counts, second.counts, strict=True)))
    return first._replace(value=first.value + second.value, counts=counts)
