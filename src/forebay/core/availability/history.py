"""Availability history of a model, as sums of seconds: how long it was observed, and how long it was usable.

Unobserved time is in no sum: it is unknown, neither good nor bad.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from forebay.core.availability.measured import LifetimeSums

HOUR_S: Final = 3600
GAP_S_MIN: Final = 30.0
"""Shorter unobserved times within an hour are not reported as a gap: control pauses when it restarts."""


@dataclass(frozen=True, slots=True)
class ServingObservation:
    """One observation of a model: replicas that should serve, that serve, that are ready; whether a gateway
    answers."""

    wanted: int
    serving: int
    ready: int
    gateway: bool

    @property
    def up(self) -> bool:
        """Requests are served. A model scaled to zero counts as up: its requests wait, as intended."""
        return self.gateway and (self.serving > 0 or not self.wanted)

    @property
    def full(self) -> bool:
        """All desired replicas serve."""
        return self.gateway and self.serving >= self.wanted


@dataclass(frozen=True, slots=True)
class AvailabilitySums:
    """Sums over a period, seconds."""

    known_s: float = 0.0
    """Observed time."""
    up_s: float = 0.0
    full_s: float = 0.0
    lived: LifetimeSums = field(default_factory=LifetimeSums)

    @property
    def down_s(self) -> float:
        """Observed, and not usable."""
        return self.known_s - self.up_s

    def __add__(self, other: "AvailabilitySums") -> "AvailabilitySums":
        return AvailabilitySums(
            self.known_s + other.known_s,
            self.up_s + other.up_s,
            self.full_s + other.full_s,
            self.lived + other.lived,
        )


def sums_of(sight: ServingObservation, seconds: float) -> AvailabilitySums:
    """The sums for `seconds` of one observed state."""
    return AvailabilitySums(
        known_s=seconds,
        up_s=seconds if sight.up else 0.0,
        full_s=seconds if sight.full else 0.0,
        lived=LifetimeSums(replica_s=seconds * sight.ready),
    )


class IncidentKind(StrEnum):
    """The kind of an incident."""

    OUTAGE = "outage"
    """A model was unusable."""
    FAILURE = "failure"
    """A replica died, or hung and was killed."""
    ROLLED_BACK = "rolled_back"
    """A rollout was rolled back."""
    LEADER = "leader"
    """The leader changed."""


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident, `at` seconds since the epoch. `lasted_s` None: its end was not observed."""

    at: float
    what: IncidentKind
    model: str
    unit: str
    why: str
    lasted_s: float | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """A period with unobserved time, seconds since the epoch, and how much of it is unobserved."""

    since: float
    until: float
    unknown_s: float


def gaps(known_s: Mapping[int, float], since: float, until: float) -> Iterator[Gap]:
    """Gaps between two times, with neighbouring hours merged. `known_s` by hours since the epoch."""
    found: Gap | None = None
    for hour in range(int(since // HOUR_S), int(until // HOUR_S) + 1):
        begin, end = max(since, hour * HOUR_S), min(until, (hour + 1) * HOUR_S)
        known = known_s.get(hour, 0.0)
        unknown_s = end - begin - known
        if unknown_s >= GAP_S_MIN or not known:  # the first and last hours may be only a second long
            found = (
                Gap(begin, end, unknown_s) if found is None else Gap(found.since, end, found.unknown_s + unknown_s)
            )
        else:
            yield from _if_reportable(found)
            found = None
    yield from _if_reportable(found)


def _if_reportable(gap: Gap | None) -> Iterator[Gap]:
    """The gap if it is long enough."""
    if gap is not None and gap.unknown_s >= GAP_S_MIN:
        yield gap
