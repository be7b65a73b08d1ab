"""The state table of a replica."""

import pytest

from forebay.core.lifecycle import NEXT, Event, step
from forebay.core.model import ReplicaState

ALIVE = [s for s in ReplicaState if s not in (ReplicaState.STOPPED, ReplicaState.QUARANTINED)]


def test_every_state_can_be_reached_from_stopped_and_left_again() -> None:
    reached = {ReplicaState.STOPPED}
    while more := {after for (before, _), after in NEXT.items() if before in reached} - reached:
        reached |= more
    assert reached == set(ReplicaState)
    for state in ReplicaState:
        assert any(before is state and after is not state for (before, _), after in NEXT.items())


@pytest.mark.parametrize("state", ALIVE)
def test_a_unit_can_die_in_every_state_it_can_have(state: ReplicaState) -> None:
    assert step(state, Event.DIED) is ReplicaState.STOPPED
    assert step(state, Event.HELD_BACK) is ReplicaState.QUARANTINED


@pytest.mark.parametrize("event", [Event.LOADS, Event.SERVES, Event.SUFFERS])
def test_draining_unit_never_becomes_ready_again(event: Event) -> None:
    assert step(ReplicaState.DRAINING, event) is ReplicaState.DRAINING


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (ReplicaState.STOPPED, Event.SERVES),
        (ReplicaState.READY, Event.PLACED),
        (ReplicaState.WARMING, Event.ADOPTED),
        (ReplicaState.QUARANTINED, Event.SERVES),
    ],
)
def test_an_invalid_transition_is_an_error(state: ReplicaState, event: Event) -> None:
    with pytest.raises(KeyError):
        step(state, event)
