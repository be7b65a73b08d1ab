"""Routing: never a full or dead replica, never a refusal while one is open, the same choice for the same view."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import Code
from forebay.core.model import Policy, ReplicaState, Task
from forebay.core.routing import LIVE, Route, Shed, Wait, Why, choose, effective_state, room

READY, DEGRADED, STARTING, DRAINING = (
    ReplicaState.READY,
    ReplicaState.DEGRADED,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
)


@dataclass(frozen=True)
class Seen:
    id: str
    load: int = 0
    state: ReplicaState = READY
    room: int = 10
    last_used: int = 0
    generation: int = 1


def pick(policy: Policy, *replicas: Seen, tried: tuple[tuple[str, int], ...] = ()) -> Route | Wait | Shed:
    return choose(policy, replicas, tried, Random(1))


TABLE = [
    (Policy.ROUND_ROBIN, (Seen("a", last_used=3), Seen("b", last_used=1), Seen("c", last_used=2)), 1, Why.NEXT),
    (Policy.ROUND_ROBIN, (Seen("a", last_used=3), Seen("b", 10, last_used=1), Seen("c", last_used=2)), 2, Why.NEXT),
    (Policy.ROUND_ROBIN, (Seen("b"), Seen("a")), 1, Why.NEXT),
    (Policy.LEAST_REQUESTS, (Seen("a", 3), Seen("b", 1), Seen("c", 2)), 1, Why.FEWEST),
    (Policy.LEAST_REQUESTS, (Seen("a", 1, last_used=2), Seen("b", 1, last_used=1)), 1, Why.FEWEST),
    (Policy.LEAST_REQUESTS, (Seen("b", 1), Seen("a", 1)), 1, Why.FEWEST),
    (Policy.P2C, (Seen("a", 3), Seen("b", 1)), 1, Why.FEWEST),
    (Policy.P2C, (Seen("a", 10), Seen("b", 9)), 1, Why.ONLY),
    (Policy.LEAST_REQUESTS, (Seen("a", 5), Seen("b", 1, DEGRADED)), 0, Why.ONLY),
    (Policy.LEAST_REQUESTS, (Seen("a", 10), Seen("b", 1, DEGRADED)), 1, Why.ONLY),
    (Policy.LEAST_REQUESTS, (Seen("a", 0, STARTING), Seen("b", 1, DEGRADED)), 1, Why.ONLY),
]


@pytest.mark.parametrize(("policy", "replicas", "index", "why"), TABLE)
def test_each_policy_picks_as_its_name_says(policy: Policy, replicas: tuple[Seen, ...], index: int, why: Why) -> None:
    assert pick(policy, *replicas) == Route(index, why)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_replica_that_failed_the_request_is_not_picked_again_unless_it_was_started_anew(policy: Policy) -> None:
    tried = (("a", 1),)
    assert pick(policy, Seen("a"), Seen("b", 9), tried=tried) == Route(1, Why.ONLY)
    assert pick(policy, Seen("a"), Seen("b", 10), tried=tried) == Wait(Why.FULL)
    assert pick(policy, Seen("a"), Seen("b", 0, STARTING), tried=tried) == Wait(Why.NONE_READY)
    assert pick(policy, Seen("a"), tried=tried) == Shed(Code.NO_REPLICA, Why.ALL_TRIED, 1)
    assert pick(policy, Seen("a", state=STARTING), tried=tried) == Wait(Why.NONE_READY)
    assert pick(policy, Seen("a", generation=2), tried=tried) == Route(0, Why.ONLY)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_request_waits_for_a_model_without_replicas(policy: Policy) -> None:
    assert pick(policy) == Wait(Why.NONE_READY)
    assert pick(policy, Seen("a", state=DRAINING)) == Wait(Why.NONE_READY)
    assert pick(policy, Seen("a", 10)) == Wait(Why.FULL)


@st.composite
def fleets(draw: st.DrawFn) -> list[Seen]:
    ids = draw(st.lists(st.sampled_from("abcdefgh"), unique=True))
    return [
        Seen(
            i,
            draw(st.integers(0, 4)),
            draw(st.sampled_from(list(ReplicaState))),
            draw(st.integers(0, 4)),
            draw(st.integers(0, 9)),
            draw(st.integers(1, 2)),
        )
        for i in sorted(ids)
    ]


tries = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 2)))


@given(st.sampled_from(list(Policy)), fleets(), tries, st.integers())
def test_the_choice_is_open_and_repeatable_and_nothing_waits_while_one_is_open(
    policy: Policy, fleet: list[Seen], tried: list[tuple[str, int]], seed: int
) -> None:
    is_open = [r.state in LIVE and r.load < r.room and (r.id, r.generation) not in tried for r in fleet]
    choice = choose(policy, fleet, tried, Random(seed))
    assert choice == choose(policy, fleet, tried, Random(seed))
    match choice:
        case Route(index):
            assert is_open[index]
            if fleet[index].state is DEGRADED:
                assert not any(o and r.state is READY for o, r in zip(is_open, fleet, strict=True))
        case Wait():
            assert not any(is_open)
        case Shed():
            assert fleet
            assert all(r.state in LIVE and (r.id, r.generation) in tried for r in fleet)


@given(st.lists(st.integers(0, 50), min_size=3, max_size=8), st.integers())
def test_two_random_choices_never_take_the_single_worst(loads: list[int], seed: int) -> None:
    fleet = [Seen(chr(97 + n), load, room=100) for n, load in enumerate(loads)]
    choice = choose(Policy.P2C, fleet, (), Random(seed))
    assert isinstance(choice, Route)
    if loads.count(max(loads)) == 1:
        assert loads[choice.at] < max(loads)


def test_round_robin_visits_everyone_equally() -> None:
    used = {"a": 0, "b": 0, "c": 0}
    visits: list[str] = []
    for turn in range(1, 31):
        fleet = [Seen(i, last_used=n) for i, n in used.items()]
        choice = choose(Policy.ROUND_ROBIN, fleet, (), Random(0))
        assert isinstance(choice, Route)
        visits.append(fleet[choice.at].id)
        used[visits[-1]] = turn
    assert visits == ["a", "b", "c"] * 10


def test_a_replica_may_hold_more_than_runs_at_once_but_never_without_bound() -> None:
    assert room(32, Task.CHAT) == 40
    assert room(1, Task.CHAT) == 3
    assert room(32, Task.EMBED) == 64
    assert room(0, Task.CHAT) == room(32, Task.CHAT)


def test_control_can_take_a_replica_out_of_service_but_not_bring_it_in() -> None:
    assert effective_state(READY, READY) is READY
    assert effective_state(READY, STARTING) is STARTING
    assert effective_state(STARTING, READY) is READY
    assert effective_state(DRAINING, READY) is DRAINING
    assert effective_state(DEGRADED, READY) is DEGRADED
    assert effective_state(DEGRADED, DRAINING) is DRAINING
    assert effective_state(ReplicaState.QUARANTINED, READY) is ReplicaState.QUARANTINED
