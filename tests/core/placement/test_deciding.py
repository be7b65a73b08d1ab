"""How the reconcile loop treats slots without a place, and slots that move."""

from dataclasses import replace

import pytest

from forebay.core.model import Endpoint, LoadReport, ReplicaState, Task, WorkerSpec
from forebay.core.reconcile import (
    Answered,
    ClusterObservation,
    Kind,
    ObservedUnit,
    Place,
    Remove,
    Rules,
    Slot,
    State,
    decide,
    needs_spare,
)

RULES = Rules()


def slot(index: int, node: str = "", **more: object) -> Slot:
    spec = WorkerSpec(f"m-{index}", 0, "m", "r", Task.CHAT, "synthetic", "", "", node=node)
    made = Slot(spec.replica, Kind.REPLICA, "m", index, f"d{node}", spec)
    return replace(made, **more)  # type: ignore[arg-type]


def running(wanted: Slot, node: str = "a") -> ObservedUnit:
    return ObservedUnit(wanted.id, 1, Kind.REPLICA, f"d{node}", 5.0, True, 7, Endpoint(7, "h", 1), node=node)


def seen(*units: ObservedUnit) -> ClusterObservation:
    ready = LoadReport("", 1, "m", "r", ReplicaState.READY)
    return ClusterObservation(units, {unit.key: Answered(ready) for unit in units})


def test_unplaceable_slot_is_not_started_and_has_a_reason() -> None:
    state, verdict = decide([slot(0, waits="fits nowhere")], State(), seen(), 0.0, RULES)
    assert (verdict.actions, [s.why for s in state.slots]) == ((), ["fits nowhere"])
    state, verdict = decide([slot(0)], state, seen(), 1.0, RULES)
    assert [type(action) for action in verdict.actions] == [Place]


@pytest.mark.parametrize(("waits", "goes"), [("fits nowhere", True), ("", False)])
def test_slot_without_a_place_does_not_block_replacements(waits: str, goes: bool) -> None:
    """What is to start some time is waited for, what cannot is not."""
    wanted = [slot(0, "b", moves="moves: a is drained"), slot(1, "a", waits=waits, memory_bytes=1)]
    _, verdict = decide(wanted, State(), seen(running(wanted[0])), 0.0, RULES)
    removed = [action for action in verdict.actions if isinstance(action, Remove)]
    assert [action.why for action in removed] == (["moves: a is drained"] if goes else [])


@pytest.mark.parametrize(
    ("to", "unit_node", "expected"),
    [
        pytest.param("b", "a", True, id="it moves"),
        pytest.param("a", "a", False, id="the same node, other settings"),
        pytest.param("b", "", False, id="where it runs is not known"),
        pytest.param("", "a", False, id="where it is to run is not known"),
    ],
)
def test_single_replica_has_a_spare_only_while_it_moves(to: str, unit_node: str, expected: bool) -> None:
    wanted, unit = slot(0, to, digest="new"), running(slot(0), unit_node)
    assert needs_spare([wanted], slot(1, to), State(), [unit]) is expected


def test_spare_is_removed_when_its_slot_cannot_be_placed() -> None:
    held, spare = slot(0, waits="fits nowhere"), slot(1)
    assert not needs_spare([held], spare, State(), [running(spare, "")])
    assert needs_spare([replace(held, waits="")], spare, State(), [running(spare, "")])
