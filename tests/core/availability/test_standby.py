"""Standby assignment: as few promotions as possible, never two for one place, never an unready replica."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.availability.standby import future_standbys, serving, standby_replicas
from forebay.core.model import Replica, ReplicaState

READY = ReplicaState.READY
STATES = st.lists(st.sampled_from(ReplicaState), max_size=8)


def fleet(states: list[ReplicaState], generation: int = 1) -> list[Replica]:
    return [Replica(f"m-{i}", generation, "r", "h", 1, state) for i, state in enumerate(states)]


@given(STATES, STATES, st.integers(0, 8))
def test_surplus_ready_replicas_are_standbys_and_serving_ones_stay(
    before: list[ReplicaState], now: list[ReplicaState], active: int
) -> None:
    told = {(r.id, r.generation): r for r in fleet(before)}
    replicas = fleet(now)
    ready = {(r.id, r.generation) for r in replicas if r.state is READY}
    rest = standby_replicas(replicas, active, serving(told))

    assert rest <= ready
    assert len(ready - rest) == min(active, len(ready))
    stay = serving(told) & ready
    assert len(stay - rest) == min(active, len(stay))
    left = {key: r for r in replicas if (key := (r.id, r.generation)) not in rest}
    assert standby_replicas(replicas, active, serving(left)) == rest, "another look changes nothing"


@given(STATES, st.integers(0, 8))
def test_starting_replica_is_published_only_while_needed(states: list[ReplicaState], active: int) -> None:
    starts = {ReplicaState.STARTING, ReplicaState.WARMING}
    all_that_start = {(r.id, r.generation) for r in fleet(states) if r.state in starts}

    assert future_standbys(fleet(states), active) == (all_that_start if states.count(READY) >= active else set())


def test_restarted_replica_is_a_standby_while_its_stand_in_serves() -> None:
    told = {("m-1", 1): fleet([READY, READY])[1]}
    again = [*fleet([READY], generation=2), *fleet([READY, READY])[1:]]

    assert standby_replicas(again, 1, serving(told)) == {("m-0", 2)}
