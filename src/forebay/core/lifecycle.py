"""The life of a replica as a table: which event leads from which state to which. A missing row is a mistake of ours.

A slot (`chat-0`) lives on from unit to unit: `stopped` and `quarantined` are the states of a slot without a unit.
"""

from enum import StrEnum

from forebay.core.model import ReplicaState


class Event(StrEnum):
    """What can happen to a replica."""

    PLACED = "placed"
    """A process is being started."""
    ADOPTED = "adopted"
    """A process that runs already was found."""
    LOADS = "loads"
    """It answers, and its engine is not loaded yet."""
    SERVES = "serves"
    """It answers, and says that it is ready."""
    SUFFERS = "suffers"
    """It says that it is degraded, or it was missed at one probe."""
    LEAVES = "leaves"
    """It was told to stop, or says that it is draining."""
    DIED = "died"
    """Its process is gone, and may be replaced at once."""
    HELD_BACK = "held_back"
    """Its process is gone for the second time in a row or more: the next start has to wait."""


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
    (_S.DRAINING, Event.PLACED): _S.STARTING,  # the successor of a gateway starts while it drains: they share a port
    (_S.DRAINING, Event.DIED): _S.STOPPED,
    (_S.DRAINING, Event.HELD_BACK): _S.QUARANTINED,
}


def step(state: ReplicaState, event: Event) -> ReplicaState:
    """The state after the event. Raises KeyError for a move that does not exist."""
    return NEXT[state, event]
