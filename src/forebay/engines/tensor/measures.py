"""What models count of their own: values that cross from their processes, and how those of several become one.

A family's series are told apart by their labels. The same series of several processes is one for who reads it:
counters and histograms add up, and of a gauge the value holds that was set last, as if all had written to one.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, runtime_checkable

FAMILIES_MAX: Final = 100
"""Of one version of a model."""
SERIES_MAX: Final = 1000
"""Of one version of a model, over all families: each is kept, and read again with every scrape."""

Labels = tuple[tuple[str, str], ...]


class Measure(StrEnum):
    """What a metric is; the names are those of the exposition format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Series(NamedTuple):
    """The values of one set of labels, which are in order."""

    labels: Labels
    value: float
    """Of a histogram the sum of what was observed."""
    set_ns: int = 0
    """When a gauge was set, CLOCK_MONOTONIC; 0: it was only incremented."""
    bounds: tuple[float, ...] = ()
    """Upper ends of a histogram's buckets, ascending."""
    counts: tuple[int, ...] = ()
    """How much is in each bucket; the last is what exceeds all bounds."""


class Family(NamedTuple):
    """All series of one name."""

    name: str
    kind: Measure
    help: str
    series: tuple[Series, ...]


@runtime_checkable
class Measuring(Protocol):
    """A backend whose model may have metrics of its own."""

    def measured(self) -> tuple[Family, ...]:
        """What they stand at. Called in any thread, also while the model runs."""


class Ledger:
    """What the processes of one version of a model have counted, those that are gone included."""

    __slots__ = ("_now", "_past")

    def __init__(self) -> None:
        self._now: dict[int, tuple[Family, ...]] = {}
        self._past: tuple[Family, ...] = ()

    def hear(self, process: int, families: tuple[Family, ...]) -> None:
        """A process says what it stands at."""
        self._now[process] = tuple(map(_whole, families[:FAMILIES_MAX]))

    def end(self, process: int) -> None:
        """A process is gone: what it has counted stays counted, and what its gauges said is true no more."""
        gone = self._now.pop(process, ())
        kept = [family for family in gone if family.kind is not Measure.GAUGE]
        if kept:
            self._past = merged((*self._past, *kept))

    def families(self) -> tuple[Family, ...]:
        """All of it."""
        return merged((*self._past, *(family for process in sorted(self._now) for family in self._now[process])))


def merged(families: Iterable[Family], *, series_max: int = SERIES_MAX) -> tuple[Family, ...]:
    """One family for each name, one series for each set of labels, in the order in which they come.

    Who comes first says what a name is: families of another kind, and series with other buckets, are left out, and so
    is what exceeds `series_max`.
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
    """Without series that are none, or too many."""
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
