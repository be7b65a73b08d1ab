"""The health states of a device, as a transition table."""

from enum import StrEnum


class Health(StrEnum):
    """The health of a device."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """In service, but slower than it should be."""
    DRAINING = "draining"
    """Nothing is placed there, and what runs there moves away. It is tried again after a time without errors."""
    QUARANTINED = "quarantined"
    """As above, until it is reset or released by an operator."""
    RECOVERING = "recovering"
    """In service on probation: after another error it stays out longer."""


class Signal(StrEnum):
    """What can happen to a device."""

    SLOWED = "slowed"
    EASED = "eased"
    FAILED = "failed"
    """An error that requires draining."""
    CONDEMNED = "condemned"
    """An error after which it is unusable until reset or replaced."""
    CALM = "calm"
    """No error for long enough."""
    MENDED = "mended"
    """It was reset."""
    RELEASED = "released"
    """Released by an operator."""


_H = Health
_OUT = (_H.DRAINING, _H.QUARANTINED)
OUT = frozenset(_OUT)
"""States that are out of service."""

NEXT: dict[tuple[Health, Signal], Health] = {
    (_H.HEALTHY, Signal.SLOWED): _H.DEGRADED,
    (_H.DEGRADED, Signal.EASED): _H.HEALTHY,
    **{(state, Signal.FAILED): _H.DRAINING for state in Health if state is not _H.QUARANTINED},
    (_H.QUARANTINED, Signal.FAILED): _H.QUARANTINED,
    **{(state, Signal.CONDEMNED): _H.QUARANTINED for state in Health},
    (_H.DRAINING, Signal.CALM): _H.RECOVERING,
    (_H.RECOVERING, Signal.CALM): _H.HEALTHY,
    (_H.QUARANTINED, Signal.MENDED): _H.RECOVERING,
    (_H.DRAINING, Signal.MENDED): _H.RECOVERING,
    **{(state, Signal.RELEASED): _H.RECOVERING for state in _OUT},
}


def move(state: Health, signal: Signal) -> Health:
    """The state after the signal. Raises KeyError for a transition that does not exist."""
    return NEXT[state, signal]
