"""What has become of a model, in sums of seconds: for how long it was seen, for how long it could be used.

What nobody has looked at is in no sum: it is unknown, and neither good nor bad.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from forebay.core.availability.measured import Lived

HOUR_S: Final = 3600
GAP_S_MIN: Final = 30.0
"""Less than that, unseen within an hour, is not told as a gap: control pauses when it is started anew."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A model at one look: replicas that are to serve, that do, that are ready at all; whether a gateway answers."""

    wanted: int
    serving: int
    ready: int
    gateway: bool

    @property
    def up(self) -> bool:
        """Requests are served. Of a model that is to have no replicas they wait, as they are meant to."""
        return self.gateway and (self.serving > 0 or not self.wanted)

    @property
    def full(self) -> bool:
        """As many replicas serve as are to."""
        return self.gateway and self.serving >= self.wanted


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sums over some time, seconds."""

    known_s: float = 0.0
    """Somebody was looking."""
    up_s: float = 0.0
    full_s: float = 0.0
    lived: Lived = field(default_factory=Lived)

    @property
    def down_s(self) -> float:
        """Seen, and of no use."""
        return self.known_s - self.up_s

    def __add__(self, other: "Stretch") -> "Stretch":
        return Stretch(
            self.known_s + other.known_s,
            self.up_s + other.up_s,
            self.full_s + other.full_s,
            self.lived + other.lived,
        )


def stretch(sight: Sight, seconds: float) -> Stretch:
    """So many seconds as they were seen."""
    return Stretch(
        known_s=seconds,
        up_s=seconds if sight.up else 0.0,
        full_s=seconds if sight.full else 0.0,
        lived=Lived(replica_s=seconds * sight.ready),
    )


class What(StrEnum):
    """What an incident is."""

    OUTAGE = "outage"
    """Nobody could use a model."""
    FAILURE = "failure"
    """A replica died, or hung and was killed."""
    ROLLED_BACK = "rolled_back"
    """A rollout was taken back."""
    LEADER = "leader"
    """Another control leads."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong, `at` seconds since the epoch. `lasted_s` None: nobody has seen its end."""

    at: float
    what: What
    model: str
    unit: str
    why: str
    lasted_s: float | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """Time of which something is not known, seconds since the epoch, and how much of it."""

    since: float
    until: float
    unknown_s: float


def gaps(known_s: Mapping[int, float], since: float, until: float) -> Iterator[Gap]:
    """What is not known between two times, neighbouring hours as one. `known_s` by hours since the epoch."""
    found: Gap | None = None
    for hour in range(int(since // HOUR_S), int(until // HOUR_S) + 1):
        begin, end = max(since, hour * HOUR_S), min(until, (hour + 1) * HOUR_S)
        known = known_s.get(hour, 0.0)
        unknown_s = end - begin - known
        if unknown_s >= GAP_S_MIN or not known:  # of the first and the last hour there may be a second only
            found = (
                Gap(begin, end, unknown_s) if found is None else Gap(found.since, end, found.unknown_s + unknown_s)
            )
        else:
            yield from _told(found)
            found = None
    yield from _told(found)


def _told(gap: Gap | None) -> Iterator[Gap]:
    """The gap if it is long enough."""
    if gap is not None and gap.unknown_s >= GAP_S_MIN:
        yield gap
