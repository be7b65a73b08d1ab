"""What a fleet is simulated with, and what has come of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from forebay.core.scaling.values import Reading


class Load(NamedTuple):
    """What comes in each tick; three columns of the same length."""

    name: str
    tick_s: float
    arrivals: Sequence[float]
    prompt_tokens: Sequence[float]
    output_tokens: Sequence[float]


class Sizer(Protocol):
    """Says how many replicas there should be."""

    def size(self, reading: Reading | None, now: float, current: int) -> int:
        """What is wanted now that `current` are; a reading of None: nothing is known."""
        ...


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to a fleet that nobody wants."""

    outages: tuple[tuple[float, float], ...] = ()
    """From when until when nothing is known of it, seconds from the beginning."""
    failures_s: tuple[float, ...] = ()
    """When a ready replica dies; another one is started in its place."""


CALM: Final = Weather()


@dataclass(slots=True)
class Story:
    """What has happened. Requests are real numbers: a fleet deals in shares of those that come in a tick."""

    arrivals: float = 0.0
    good: float = 0.0
    """Answered within the promise."""
    late: float = 0.0
    """Answered, but not so."""
    refused: float = 0.0
    """Waited too long."""
    open: float = 0.0
    """Still waiting at the end."""
    replica_s: float = 0.0
    """Of all replicas, from the order on."""
    started: int = 0
    turns: list[float] = field(default_factory=list)
    """When the wanted number began to go the other way."""
    wanted: list[int] = field(default_factory=list)
    """At the end of each tick, if somebody decides."""
    ready: list[int] = field(default_factory=list)
    """In each tick."""
    shares: list[float] = field(default_factory=list)
    """Of what was answered or refused in each tick, what was good; 1 if nothing was."""

    @property
    def attainment(self) -> float:
        """Share of all requests that were answered within the promise."""
        return self.good / self.arrivals if self.arrivals else 1.0

    @property
    def replica_hours(self) -> float:
        """Of all replicas, from the order on."""
        return self.replica_s / 3600
