"""Inputs and results of a fleet simulation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from forebay.core.scaling.values import Reading


class Load(NamedTuple):
    """Arrivals per tick; three columns of the same length."""

    name: str
    tick_s: float
    arrivals: Sequence[float]
    prompt_tokens: Sequence[float]
    output_tokens: Sequence[float]


class Sizer(Protocol):
    """Decides how many replicas there should be."""

    def size(self, reading: Reading | None, now: float, current: int) -> int:
        """The desired number instead of `current`; `reading` None: unknown."""
        ...


@dataclass(frozen=True, slots=True)
class FleetFaults:
    """Faults of a fleet."""

    outages: tuple[tuple[float, float], ...] = ()
    """Periods without readings, seconds from the start."""
    failures_s: tuple[float, ...] = ()
    """Times at which a ready replica dies; another one is started in its place."""


CALM: Final = FleetFaults()


@dataclass(slots=True)
class FleetResult:
    """The results. Requests are fractional: a fleet handles shares of a tick's arrivals."""

    arrivals: float = 0.0
    good: float = 0.0
    """Answered within the objective."""
    late: float = 0.0
    """Answered, but not within the objective."""
    refused: float = 0.0
    """Rejected after waiting too long."""
    open: float = 0.0
    """Still queued at the end."""
    replica_s: float = 0.0
    """Of all replicas, from the order on."""
    started: int = 0
    turns: list[float] = field(default_factory=list)
    """Times at which the desired number changed direction."""
    wanted: list[int] = field(default_factory=list)
    """Desired number at the end of each tick, if there is a sizer."""
    ready: list[int] = field(default_factory=list)
    """Ready replicas in each tick."""
    shares: list[float] = field(default_factory=list)
    """Per tick, the good share of answered or rejected requests; 1 if there were none."""

    @property
    def attainment(self) -> float:
        """Share of all requests that met the objective."""
        return self.good / self.arrivals if self.arrivals else 1.0

    @property
    def replica_hours(self) -> float:
        """Of all replicas, from the order on."""
        return self.replica_s / 3600
