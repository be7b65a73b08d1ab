"""Policies that count requests or follow a key."""

from collections import Counter
from random import Random

import pytest
from tests.sim.rivals.fleet import Gateway, ask, states

from forebay.core.routing.policies import mix
from forebay.sim.rivals import Rival
from forebay.sim.rivals.counting import AnyReplica, BoundedHash, LeastRequests, PowerOfTwo, RoundRobin


def test_round_robin_visits_all_live_replicas() -> None:
    gateway = Gateway(RoundRobin(), states(3, alive=[True, False, True]))

    assert [gateway.place(ask(n, 1)) for n in range(5)] == [0, 2, 0, 2, 0]


@pytest.mark.parametrize(
    ("rival", "loads", "expected"),
    [
        (LeastRequests(), [3, 1, 2, 1], {1, 3}),
        (PowerOfTwo(), [5, 0, 9, 9], {0, 1, 2, 3}),
        (AnyReplica(), [5, 0, 9, 9], {0, 1, 2, 3}),
        (PowerOfTwo(), [7], {0}),
    ],
)
def test_counting_rivals_choose_only_the_expected_replicas(
    rival: Rival, loads: list[int], expected: set[int]
) -> None:
    replicas, rng = states(len(loads), in_flight=loads), Random(3)
    chosen = Counter(rival.choose(ask(n, 1), replicas, 0.0, rng) for n in range(300))

    assert set(chosen) <= expected
    if isinstance(rival, PowerOfTwo) and len(loads) > 1:
        assert chosen[1] > 120  # in half of the pairs
        assert chosen[2] + chosen[3] < 100  # only where they meet: in one pair of six
    else:
        assert set(chosen) == expected


def order(keyed: BoundedHash, *blocks: int) -> list[int]:
    """The replicas that a key goes to, one after the other, as those before it get full."""
    found: list[int] = []
    replicas = states(4)
    for n in range(4):
        at = keyed.choose(ask(n, *blocks), replicas, 0.0, Random(0))
        found.append(at)
        for state in replicas:
            state.in_flight = 50 if state.id in {replicas[at].id for at in found} else 0
    return found


def test_bounded_hash_orders_replicas_by_key() -> None:
    keyed = BoundedHash(1)
    orders = {tuple(order(keyed, block)) for block in range(40)}

    assert all(sorted(found) == [0, 1, 2, 3] for found in orders)
    assert {found[0] for found in orders} == {0, 1, 2, 3}
    assert order(keyed, 7, 8) == order(keyed, 7, 9)
    assert order(BoundedHash(2), 7, 8) != order(BoundedHash(2), 7, 9)


@pytest.mark.parametrize(
    ("to_least", "loads", "at_home"),
    [
        (False, [12, 10, 10, 10], True),  # below ceil(1.25 · 43 / 4) = 14
        (False, [14, 10, 10, 8], False),
        (True, [13, 10, 10, 10], True),  # at most 1.25 · 44 / 4 = 13.75
        (True, [14, 9, 10, 10], False),
    ],
)
def test_bounded_hash_leaves_a_replica_above_its_load_bound(to_least: bool, loads: list[int], at_home: bool) -> None:
    keyed = BoundedHash(1, to_least=to_least)
    block = next(block for block in range(99) if keyed.choose(ask(0, block), states(4), 0.0, Random(0)) == 0)
    chosen = keyed.choose(ask(0, block), states(4, in_flight=loads), 0.0, Random(0))

    assert (chosen == 0) is at_home
    if not at_home:
        assert chosen == (1 if to_least else order(keyed, block)[1])


def test_a_lost_replica_moves_only_its_own_keys() -> None:
    keyed, replicas = BoundedHash(1), states(5)
    before = [keyed.choose(ask(0, block), replicas, 0.0, Random(0)) for block in range(100)]
    replicas[2].alive = False
    after = [keyed.choose(ask(0, block), replicas, 0.0, Random(0)) for block in range(100)]

    assert {(was, now) for was, now in zip(before, after, strict=True) if was != now} == {
        (2, now) for now in (0, 1, 3, 4)
    }


def test_bounded_hash_key_falls_back_to_the_request() -> None:
    by_tenant, replicas = BoundedHash(0), states(4)
    same = {by_tenant.choose(ask(n, n, tenant="a"), replicas, 0.0, Random(0)) for n in range(20)}
    spread = {by_tenant.choose(ask(n, tokens=9), replicas, 0.0, Random(0)) for n in range(20)}

    assert len(same) == 1
    assert len(spread) == 4
    assert {BoundedHash(1).choose(ask(n, tokens=9), replicas, 0.0, Random(0)) for n in range(20)} == spread


def test_bounded_hash_spreads_keys_evenly() -> None:
    keyed, replicas = BoundedHash(1), states(8)
    shares = Counter(keyed.choose(ask(0, mix(block)), replicas, 0.0, Random(0)) for block in range(4000))

    assert min(shares.values()) > 0.85 * 500
    assert max(shares.values()) < 1.15 * 500
