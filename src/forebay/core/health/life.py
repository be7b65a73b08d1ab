"""The life of a device as a table: which event leads from which state to which."""

from enum import StrEnum


class Health(StrEnum):
    """How a device is."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It serves, slower than it should."""
    DRAINING = "draining"
    """Nothing new goes there, and what runs there moves away. It is tried again after a time without errors."""
    QUARANTINED = "quarantined"
    """As above, until it was reset, or until a person lets it serve again."""
    RECOVERING = "recovering"
    """It may serve again, on probation: one more error, and it is out for longer."""


class Signal(StrEnum):
    """What can happen to a device."""

    SLOWED = "slowed"
    EASED = "eased"
    FAILED = "failed"
    """An error after which it should rest."""
    CONDEMNED = "condemned"
    """An error after which it is of no use as it is."""
    CALM = "calm"
    """There was no error for long enough."""
    MENDED = "mended"
    """It was reset."""
    RELEASED = "released"
    """A person says that it is good."""


_H = Health
_OUT = (_H.DRAINING, _H.QUARANTINED)
OUT = frozenset(_OUT)
"""States in which nothing may run there."""

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
    """The state after the signal. Raises KeyError for a move that does not exist."""
    return NEXT[state, signal]
