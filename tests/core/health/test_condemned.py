"""A unit whose device reported an error is replaced; other units and its successor are not."""

from tests.control.units import replica

from forebay.core.model import Endpoint, ReplicaState
from forebay.core.reconcile import (
    Answered,
    ClusterObservation,
    Kind,
    ObservedUnit,
    Place,
    Remove,
    Rules,
    State,
    decide,
)

HERE = Endpoint(7, "127.0.0.1", 8100)
WANTED = [replica("chat-0"), replica("chat-1")]


def unit(slot: str, generation: int = 1) -> ObservedUnit:
    return ObservedUnit(slot, generation, Kind.REPLICA, WANTED[0].digest, 5.0, alive=True, pid=7, endpoint=HERE)


def test_only_condemned_units_are_killed_and_replaced_at_once() -> None:
    units = (unit("chat-0"), unit("chat-1"))
    answers = {each.key: Answered() for each in units}
    state, _ = decide(WANTED, State(), ClusterObservation(units, answers), 0.0, Rules())
    why = "its device gpu-0: XID 94: contained ECC error"
    condemned = {("chat-0", 1): why, ("chat-0", 2): "another one", ("chat-9", 1): "gone"}
    state, verdict = decide(WANTED, state, ClusterObservation(units, answers, condemned=condemned), 1.0, Rules())

    assert verdict.actions == (Remove("chat-0", 1, 0.0, f"{why}; killed"),)
    assert [s.state for s in state.slots] == [ReplicaState.DRAINING, ReplicaState.READY]
    left = (units[1],)
    state, verdict = decide(
        WANTED, state, ClusterObservation(left, answers, condemned={("chat-0", 1): why}), 1.5, Rules()
    )
    assert [type(action) for action in verdict.actions] == [Place]
    assert [s.restarts for s in state.slots] == [1, 0]
