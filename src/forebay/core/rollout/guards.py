"""Guards, which roll back at once, without statistics."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple


class Harm(StrEnum):
    """What happened to the canary."""

    CRASH = "crash"
    OUT_OF_MEMORY = "out_of_memory"
    SERVER_ERROR = "server_error"


class Incident(NamedTuple):
    """One such event."""

    harm: Harm
    at_s: float


class Guard(NamedTuple):
    """Trips after this many incidents within the window, if they are at least this share of the canary's answers in
    it."""

    harm: Harm
    times: int
    window_s: float
    share: float = 0.0


class Tripped(NamedTuple):
    """A tripped guard."""

    guard: Guard
    times: int
    reason: str


GUARDS: Final = (
    Guard(Harm.CRASH, 1, 600.0),
    Guard(Harm.OUT_OF_MEMORY, 1, 600.0),
    Guard(Harm.SERVER_ERROR, 5, 30.0, 0.5),
)
"""A crash caused by the machine rolls back a good canary needlessly; a crash caused by the canary costs requests."""


def tripped(
    incidents: Iterable[Incident], answers_at_s: Sequence[float], now: float, guards: Sequence[Guard] = GUARDS
) -> Tripped | None:
    """The first tripped guard, if any; `answers_at_s` are the times of all the canary's answers, good ones too."""
    noted = tuple(incidents)
    for guard in guards:
        since = now - guard.window_s
        count = sum(incident.harm is guard.harm and since < incident.at_s <= now for incident in noted)
        answers = sum(since < at_s <= now for at_s in answers_at_s)
        if count >= guard.times and count >= guard.share * answers:
            reason = f"{count} x {guard.harm} of the canary within {guard.window_s:g} s"
            return Tripped(guard, count, reason)
    return None
