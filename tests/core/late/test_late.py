"""Late binding: room derived from load reports, and which requests wait for the best replica despite free ones."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.routing.views import choose

from forebay.core.model import Policy, ReplicaState
from forebay.core.routing import (
    Meter,
    PrefixIndex,
    Pricing,
    Route,
    RoutingRequest,
    Wait,
    Why,
    learned_room,
    may_wait,
    share_of_room,
)
from forebay.core.routing.late import GROWTH, SLACK_S, SPARE

MOST, PLACES = 320, 256
PROMPT = (11, 12, 13, 14)
LONG = 8000


@dataclass
class Seen:
    id: str
    meter: Meter
    load: int = 0
    room: int = 10
    state: ReplicaState = ReplicaState.READY
    last_used: int = 0
    generation: int = 1


class NoRng:
    def randrange(self, stop: int, /) -> int:
        raise AssertionError("nothing is left to chance")


def fleet(*loads: int, strained: bool = True, kv_share: float = 0.9) -> tuple[list[Seen], Pricing]:
    """Replicas with room for ten, the first one holds the prompt; those that are full are strained, or not."""
    pricing = Pricing(PrefixIndex())
    replicas = [Seen(f"r{n}", Meter(f"r{n}", pricing.index.join()), load) for n, load in enumerate(loads)]
    pricing.index.note(replicas[0].meter.mask, PROMPT, 0.0)
    for each in replicas:
        each.meter.strained = strained and each.load >= each.room
        each.meter.kv_share = kv_share
    return replicas, pricing


def pick(replicas: list[Seen], pricing: Pricing, ask: RoutingRequest, policy: Policy = Policy.CPR) -> object:
    """What is decided, and why."""
    choice = choose(policy, replicas, (), NoRng(), request=ask, pricing=pricing)
    return (choice.at, choice.why) if isinstance(choice, Route) else choice


def long_ask(**more: object) -> RoutingRequest:
    """A prompt that takes seconds to read where no cache holds it."""
    ask = RoutingRequest(7, LONG, blocks=PROMPT, block_tokens=LONG // len(PROMPT))
    for name, value in more.items():
        setattr(ask, name, value)
    return ask


@pytest.mark.parametrize(
    ("filled", "running", "waiting", "kv_share", "learned"),
    [
        (False, 100, 0, 0.99, None),  # all that came has been begun
        (False, 100, 9, 0.5, None),  # it waits to be read, not for memory
        (False, 100, 9, 0.9, 100 + SPARE),
        (False, 256, 1, 0.0, 256 + SPARE),  # every place is taken
        (True, 100, 9, 0.5, 100 + SPARE),  # memory was short, so it still is
        (True, 100, 0, 0.7, 100 + int(100 * GROWTH)),
        (True, 30, 0, 0.7, 30 + SPARE),
        (True, 200, 0, 0.1, 200 + int(200 * GROWTH)),  # its places were short
        (True, 100, 0, 0.5, None),
        (True, 319, 1, 1.0, MOST),
        (True, 319, 0, 1.0, MOST),
        (False, 0, 1, 1.0, SPARE),  # nothing runs: it must not stay so
    ],
)
def test_room_of_a_full_engine_is_its_number_of_running_requests(
    filled: bool, running: int, waiting: int, kv_share: float, learned: int | None
) -> None:
    assert learned_room(filled, MOST, PLACES, running=running, waiting=waiting, kv_share=kv_share) == learned


@given(st.booleans(), st.integers(0, 400), st.integers(0, 9), st.floats(0.0, 1.0))
def test_room_is_learned_within_bounds_and_only_from_engines_with_waiting_requests(
    filled: bool, running: int, waiting: int, kv_share: float
) -> None:
    learned = learned_room(filled, MOST, PLACES, running=running, waiting=waiting, kv_share=kv_share)
    if learned is not None:
        assert min(MOST, running + SPARE) <= learned <= MOST
        assert filled or waiting


@given(st.integers(0, 400), st.integers(0, 400), st.integers(1, 16))
def test_shares_of_room_of_all_gateways_fill_it_with_little_excess(room: int, load: int, gateways: int) -> None:
    each = share_of_room(room, load, gateways)
    free = max(0, room - load)
    assert free <= gateways * max(0, each - load) < free + gateways
    assert share_of_room(room, load, 1) == room


def test_a_request_waits_for_the_full_replica_that_caches_its_prompt() -> None:
    assert pick(*fleet(10, 0, 0), long_ask()) == Wait(Why.BEST_FULL, 0)


@pytest.mark.parametrize(
    ("ask", "strained", "kv_share", "policy"),
    [
        (long_ask(patient=False), True, 0.9, Policy.CPR),
        (RoutingRequest(7, 100), True, 0.9, Policy.CPR),  # short: it saves next to nothing
        (long_ask(), False, 0.9, Policy.CPR),  # full, but nothing is known of what waits there
        (long_ask(), True, 0.5, Policy.CPR),  # the others have memory to spare
        (long_ask(), True, 0.0, Policy.CPR),  # or do not say what they use
        (long_ask(), True, 0.9, Policy.LEAST_REQUESTS),
        (long_ask(), True, 0.9, Policy.PREFIX_AFFINITY),
    ],
)
def test_other_requests_go_to_replicas_with_room(
    ask: RoutingRequest, strained: bool, kv_share: float, policy: Policy
) -> None:
    choice = pick(*fleet(10, 0, 0, strained=strained, kv_share=kv_share), ask, policy)
    assert isinstance(choice, tuple)
    assert choice[0] in (1, 2)


def test_wait_for_a_full_replica_has_its_reason_and_all_scores() -> None:
    replicas, pricing = fleet(9, 10, 10)
    choice = choose(Policy.CPR, replicas, (), NoRng(), request=long_ask(held=True), pricing=pricing)
    assert isinstance(choice, Route)
    assert (choice.at, choice.why) == (0, Why.HELD)
    assert [score.at for score in choice.terms] == [0, 1, 2]


def test_request_waits_for_any_replica_when_all_are_full() -> None:
    assert pick(*fleet(10, 10), long_ask()) == Wait(Why.FULL)


@given(st.lists(st.integers(0, 12), min_size=2, max_size=6), st.booleans(), st.integers(0, 30_000))
def test_no_request_waits_to_save_less_than_the_slack(loads: list[int], held: bool, tokens: int) -> None:
    replicas, pricing = fleet(*loads)
    ask = RoutingRequest(7, tokens, blocks=PROMPT, block_tokens=max(1, tokens // len(PROMPT)))
    ask.held = held
    choice = choose(Policy.CPR, replicas, (), NoRng(), request=ask, pricing=pricing)
    open_to = [at for at, each in enumerate(replicas) if each.load < each.room]
    if isinstance(choice, Route):
        assert choice.at in open_to
    else:
        assert isinstance(choice, Wait)
        assert (choice.why is Why.FULL) is (not open_to)
        if open_to:
            for each in replicas:  # had all of them room, this would be where
                each.room = 100
            best = choose(Policy.CPR, replicas, (), NoRng(), request=ask, pricing=pricing)
            assert isinstance(best, Route)
            totals = {score.at: score.total_s for score in best.terms}
            assert replicas[choice.at].load >= 10
            assert totals[choice.at] + SLACK_S < min(totals[at] for at in open_to)


def test_request_waits_at_most_half_of_its_deadline() -> None:
    assert may_wait(began=10.0, deadline=14.0, now=11.9)
    assert not may_wait(began=10.0, deadline=14.0, now=12.0)
