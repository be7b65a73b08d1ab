"""Routing: never a full or dead replica, never a rejection while one is available, and deterministic."""

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.routing.views import choose

from forebay.core.errors import Code
from forebay.core.model import Policy, ReplicaState, Task
from forebay.core.routing import (
    BATCH,
    INTERACTIVE,
    LIVE,
    Meter,
    PrefixIndex,
    Pricing,
    Route,
    RoutingRequest,
    Shed,
    Wait,
    Why,
    effective_state,
    room,
)

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
    places: int = 0
    last_used: int = 0
    generation: int = 1

    @property
    def meter(self) -> Meter:
        return METERS[self.id]


INDEX = PrefixIndex()
METERS = {id: Meter(id, INDEX.join()) for id in "abcdefgh"}
PROMPT = (11, 12, 13, 14)
INDEX.note(METERS["a"].mask, PROMPT[:3], 0.0)
INDEX.note(METERS["b"].mask, PROMPT[:3], 0.0)
INDEX.note(METERS["c"].mask, PROMPT[:2], 0.0)
ASK = RoutingRequest(seed=7, tokens=400, blocks=PROMPT, block_tokens=100)


def verdict(choice: Route | Wait | Shed) -> tuple[object, ...]:
    """All that a choice says: of a route, where, why, and how much of the prompt is held there."""
    return (choice.at, choice.why, choice.hit_tokens) if isinstance(choice, Route) else (*choice,)


def pick(policy: Policy, *replicas: Seen, tried: tuple[tuple[str, int], ...] = ()) -> tuple[object, ...]:
    return verdict(choose(policy, replicas, tried, Random(1)))


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
    assert pick(policy, *replicas) == (index, why, 0)


@pytest.mark.parametrize("policy", [Policy.CPR, Policy.PREFIX_AFFINITY, Policy.CONSISTENT_HASH])
def test_prefix_and_key_policies_count_requests_if_the_request_is_unknown(policy: Policy) -> None:
    assert pick(policy, Seen("a", 3), Seen("b", 1)) == (1, Why.FEWEST, 0)


AFFINE = [
    ((Seen("a", 1), Seen("c"), Seen("d")), 0, Why.LONGEST_PREFIX, 300),
    ((Seen("a", 2), Seen("b", 1), Seen("d")), 1, Why.LONGEST_PREFIX, 300),
    ((Seen("a", 3), Seen("c", 2), Seen("d", 1)), 0, Why.LONGEST_PREFIX, 300),
    ((Seen("a", 4), Seen("c", 1), Seen("d", 1)), 1, Why.FEWEST, 200),
    ((Seen("c"), Seen("d")), 0, Why.FEWEST, 200),
    ((Seen("c", 1), Seen("d")), 1, Why.FEWEST, 0),
]


@pytest.mark.parametrize(("replicas", "index", "why", "hit_tokens"), AFFINE)
def test_prefix_affinity_follows_the_longest_cached_prefix_below_a_load_bound(
    replicas: tuple[Seen, ...], index: int, why: Why, hit_tokens: int
) -> None:
    choice = choose(Policy.PREFIX_AFFINITY, replicas, (), Random(1), request=ASK, pricing=Pricing(INDEX))
    assert verdict(choice) == (index, why, hit_tokens)


def hashed(fleet: list[Seen], ask: RoutingRequest) -> tuple[str, Why]:
    choice = choose(Policy.CONSISTENT_HASH, fleet, (), Random(1), request=ask, pricing=Pricing(INDEX))
    assert isinstance(choice, Route)
    return fleet[choice.at].id, choice.why


def test_consistent_hash_moves_only_keys_of_a_lost_replica() -> None:
    fleet = [Seen(i) for i in "abcde"]
    homes = {key: hashed(fleet, RoutingRequest(key, 1, key=key))[0] for key in range(1, 2001)}
    assert all(320 <= count <= 480 for count in Counter(homes.values()).values())
    rest = [r for r in fleet if r.id != "c"]
    moved = Counter()
    for key, home in homes.items():
        now = hashed(rest, RoutingRequest(0, 1, key=key))[0]
        assert home in (now, "c")
        moved[now] += home == "c"
    assert all(count >= 0.15 * moved.total() for count in moved.values())


def test_consistent_hash_leaves_a_replica_far_above_the_mean_load() -> None:
    home, why = hashed([Seen(i) for i in "abcd"], RoutingRequest(0, 1, key=5))
    assert why is Why.ITS_KEY
    for load, stays in ((0, True), (7, True), (8, False)):  # 8 is a quarter above the mean, rounded up
        now, why = hashed([Seen(i, load if i == home else 5) for i in "abcd"], RoutingRequest(0, 1, key=5))
        assert (now == home, why) == ((True, Why.ITS_KEY) if stays else (False, Why.KEY_OVERFLOW))


def test_consistent_hash_stays_while_its_replica_has_free_slots() -> None:
    home, _ = hashed([Seen(i) for i in "abcd"], RoutingRequest(0, 1, key=5))
    for load, why in ((1, Why.ITS_KEY), (7, Why.ITS_KEY), (8, Why.KEY_OVERFLOW)):
        fleet = [Seen(i, load if i == home else 0, places=8) for i in "abcd"]
        assert hashed(fleet, RoutingRequest(0, 1, key=5))[1] is why


def test_consistent_hash_says_so_if_the_replica_of_a_key_is_full() -> None:
    home, _ = hashed([Seen(i) for i in "abcd"], RoutingRequest(0, 1, key=5))
    for full in "abcd":
        fleet = [Seen(i, 10 if i == full else 0, places=8) for i in "abcd"]
        assert hashed(fleet, RoutingRequest(0, 1, key=5))[1] is (Why.KEY_OVERFLOW if full == home else Why.ITS_KEY)


def test_consistent_hash_falls_back_to_the_first_block_and_then_to_the_request() -> None:
    fleet = [Seen(i) for i in "abcdefgh"]
    assert len({hashed(fleet, RoutingRequest(seed, 1, blocks=(99,))) for seed in range(50)}) == 1
    assert hashed(fleet, RoutingRequest(3, 1, blocks=(99,))) == hashed(fleet, RoutingRequest(1, 1, key=99))
    assert len({hashed(fleet, RoutingRequest(seed, 1)) for seed in range(50)}) > 3


@pytest.mark.parametrize("policy", list(Policy))
def test_a_replica_that_failed_the_request_is_not_picked_again_unless_it_was_started_anew(policy: Policy) -> None:
    tried = (("a", 1),)
    assert pick(policy, Seen("a"), Seen("b", 9), tried=tried) == (1, Why.ONLY, 0)
    assert pick(policy, Seen("a"), Seen("b", 10), tried=tried) == Wait(Why.FULL)
    assert pick(policy, Seen("a"), Seen("b", 0, STARTING), tried=tried) == Wait(Why.NONE_READY)
    assert pick(policy, Seen("a"), tried=tried) == Shed(Code.NO_REPLICA, Why.ALL_TRIED, 1)
    assert pick(policy, Seen("a", state=STARTING), tried=tried) == Wait(Why.NONE_READY)
    assert pick(policy, Seen("a", generation=2), tried=tried) == (0, Why.ONLY, 0)


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


asks = st.builds(
    RoutingRequest,
    st.integers(0, 2**64 - 1),
    st.integers(1, 10**6),
    st.floats(0, 1e5),
    st.sampled_from([(), PROMPT, (99,)]),
    st.integers(0, 512),
    key=st.integers(0, 2**64 - 1),
    stays=st.booleans(),
    weights=st.sampled_from([INTERACTIVE, BATCH]),
    ttft_budget_s=st.none() | st.floats(0, 100),
)


@given(st.sampled_from(list(Policy)), fleets(), tries, st.integers(), st.none() | asks)
def test_choice_is_open_and_repeatable_and_waits_only_without_an_open_replica(
    policy: Policy, fleet: list[Seen], tried: list[tuple[str, int]], seed: int, ask: RoutingRequest | None
) -> None:
    is_open = [r.state in LIVE and r.load < r.room and (r.id, r.generation) not in tried for r in fleet]
    choice, again = (
        choose(policy, fleet, tried, Random(seed), request=ask, pricing=Pricing(INDEX)) for _ in range(2)
    )
    assert verdict(choice) == verdict(again)
    match choice:
        case Route(at=index):
            assert is_open[index]
            if fleet[index].state is DEGRADED and choice.why not in {Why.ITS_SESSION, Why.NEW_SESSION}:
                assert not any(o and r.state is READY for o, r in zip(is_open, fleet, strict=True))
        case Wait(why):
            assert why is Why.SESSION_FULL or not any(is_open)
        case Shed():
            assert fleet
            assert all(r.state in LIVE and (r.id, r.generation) in tried for r in fleet)


@given(st.sampled_from(list(Policy)), fleets(), fleets(), st.integers(0, 2**33))
def test_a_session_stays_on_its_replica_while_that_lives(
    policy: Policy, fleet: list[Seen], later: list[Seen], key: int
) -> None:
    ask = RoutingRequest(seed=1, tokens=1, key=key, stays=True)

    def of(fleet: list[Seen]) -> str:
        """Where the session is; empty if it has to wait."""
        choice = choose(policy, fleet, (), Random(1), request=ask, pricing=Pricing(INDEX))
        assert not isinstance(choice, Shed)
        return fleet[choice.at].id if isinstance(choice, Route) else ""

    live, live_later = ({r.id for r in each if r.state in LIVE} for each in (fleet, later))
    before, after = of(fleet), of(later)
    if before and after and before in live_later and live_later <= live:
        assert after == before
    if not after:
        assert not live_later or any(r.state in LIVE and r.load >= r.room for r in later)


def test_sessions_are_spread_over_replicas() -> None:
    fleet = [Seen(chr(97 + n), 0, room=9) for n in range(4)]
    asks = [RoutingRequest(seed=1, tokens=1, key=key, stays=True) for key in range(1, 401)]
    choices = [choose(Policy.CPR, fleet, (), Random(1), request=ask, pricing=Pricing(INDEX)) for ask in asks]
    homes = Counter(choice.at for choice in choices if isinstance(choice, Route))
    assert len(homes) == 4
    assert min(homes.values()) > 60


@given(st.lists(st.integers(0, 50), min_size=3, max_size=8), st.integers())
def test_p2c_never_picks_the_most_loaded_replica(loads: list[int], seed: int) -> None:
    fleet = [Seen(chr(97 + n), load, room=100) for n, load in enumerate(loads)]
    choice = choose(Policy.P2C, fleet, (), Random(seed))
    assert isinstance(choice, Route)
    if loads.count(max(loads)) == 1:
        assert loads[choice.at] < max(loads)


def test_round_robin_visits_replicas_equally() -> None:
    used = {"a": 0, "b": 0, "c": 0}
    visits: list[str] = []
    for turn in range(1, 31):
        fleet = [Seen(i, last_used=n) for i, n in used.items()]
        choice = choose(Policy.ROUND_ROBIN, fleet, (), Random(0))
        assert isinstance(choice, Route)
        visits.append(fleet[choice.at].id)
        used[visits[-1]] = turn
    assert visits == ["a", "b", "c"] * 10


def test_round_robin_gives_a_slow_replica_fewer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METERS["a"], "handicap", 4.0)
    fleet = [Seen(i) for i in "abc"]
    visits: list[str] = []
    for turn in range(1, 91):
        choice = choose(Policy.ROUND_ROBIN, fleet, (), Random(0))
        assert isinstance(choice, Route)
        visits.append(fleet[choice.at].id)
        fleet[choice.at] = replace(fleet[choice.at], last_used=turn)
    assert visits[45:].count("a") == pytest.approx(5, abs=1)  # a ninth: 1 beside 4 and 4
    assert visits[45:].count("b") == pytest.approx(20, abs=1)


@pytest.mark.parametrize("policy", [p for p in Policy if p is not Policy.CPR])
def test_every_policy_gives_less_to_a_replica_that_is_slow(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METERS["a"], "handicap", 4.0)
    got: Counter[int] = Counter()
    fleet = [Seen(i, room=100) for i in "ab"]
    for turn in range(1, 61):
        ask = RoutingRequest(seed=turn, tokens=1, key=turn)
        choice = choose(policy, fleet, (), Random(turn), request=ask, pricing=Pricing(INDEX))
        assert isinstance(choice, Route)
        got[choice.at] += 1
        chosen = fleet[choice.at]
        fleet[choice.at] = replace(chosen, last_used=turn, load=chosen.load + 1)
    assert 8 <= got[0] <= 24


def test_session_home_takes_precedence_over_its_hash_key() -> None:
    fleet = [Seen(chr(97 + n)) for n in range(4)]
    for key in range(1, 9):
        ask = RoutingRequest(seed=1, tokens=1, key=key, stays=True)
        for home, why in (("", Why.NEW_SESSION), ("c", Why.ITS_SESSION), ("gone", Why.NEW_SESSION)):
            ask.home = home
            choice = choose(Policy.CPR, fleet, (), Random(1), request=ask, pricing=Pricing(INDEX))
            assert isinstance(choice, Route)
            assert choice.why is why
            assert home != "c" or fleet[choice.at].id == "c"


def test_single_candidate_is_scored_too() -> None:
    fleet = [Seen("a"), Seen("b", load=9, room=9)]
    choice = choose(
        Policy.CPR, fleet, (), Random(1), request=RoutingRequest(seed=1, tokens=100), pricing=Pricing(INDEX)
    )
    assert isinstance(choice, Route)
    assert (choice.why, [term.at for term in choice.terms or ()]) == (Why.ONLY, [0])


def test_room_of_a_replica_exceeds_its_capacity_within_a_bound() -> None:
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
