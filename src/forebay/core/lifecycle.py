"""The life cycle of a replica as a transition table. A missing row is a bug in Forebay.

A slot (`chat-0`) outlives its units: `stopped` and `quarantined` are states of a slot without a unit.
"""

from enum import StrEnum

from forebay.core.model import ReplicaState


class Event(StrEnum):
    """What can happen to a replica."""

    PLACED = "placed"
    """A process is being started."""
    ADOPTED = "adopted"
    """A process that was already running was found."""
    LOADS = "loads"
    """It answers probes, but its engine is still loading."""
    SERVES = "serves"
    """It answers probes and reports that it is ready."""
    SUFFERS = "suffers"
    """It reports that it is degraded, or it missed probes."""
    LEAVES = "leaves"
    """It was told to stop, or reports that it is draining."""
    DIED = "died"
    """Its process has ended and may be replaced at once."""
    HELD_BACK = "held_back"
    """Its process has ended at least twice in a row: the next start is delayed (back-off)."""


_S = ReplicaState
_ANSWERS = {
    Event.LOADS: _S.WARMING,
    Event.SERVES: _S.READY,
    Event.SUFFERS: _S.DEGRADED,
    Event.LEAVES: _S.DRAINING,
    Event.DIED: _S.STOPPED,
    Event.HELD_BACK: _S.QUARANTINED,
}

NEXT: dict[tuple[ReplicaState, Event], ReplicaState] = {
    (_S.STOPPED, Event.PLACED): _S.STARTING,
    (_S.STOPPED, Event.ADOPTED): _S.STARTING,
    (_S.QUARANTINED, Event.PLACED): _S.STARTING,
    (_S.QUARANTINED, Event.DIED): _S.STOPPED,
    **{(_S.STARTING, event): state for event, state in _ANSWERS.items()},
    **{(_S.WARMING, event): state for event, state in _ANSWERS.items()},
    **{(_S.READY, event): state for event, state in _ANSWERS.items()},
    **{(_S.DEGRADED, event): state for event, state in _ANSWERS.items()},
    **{(_S.DRAINING, event): _S.DRAINING for event in _ANSWERS},
    (_S.DRAINING, Event.PLACED): _S.STARTING,  # a gateway's successor starts while it drains: they share a port
    (_S.DRAINING, Event.DIED): _S.STOPPED,
    (_S.DRAINING, Event.HELD_BACK): _S.QUARANTINED,
}


def step(state: ReplicaState, event: Event) -> ReplicaState:
    """The state after the event. Raises KeyError for a transition that does not exist."""
    return NEXT[state, event]
