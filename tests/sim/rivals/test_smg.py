"""`cache_aware` by hand."""

import pytest
from tests.sim.rivals.fleet import Gateway, ask, states

from forebay.sim.rivals import Report
from forebay.sim.rivals.smg import CacheAware, Switch

PROMPT = tuple(range(10))


def test_cache_aware_follows_matches_above_the_threshold_else_the_least_load() -> None:
    gateway = Gateway(CacheAware(Switch()), states(3, in_flight=[5, 1, 3]))
    gateway.put(ask(0, *PROMPT), 0)

    assert gateway.place(ask(1, *PROMPT[:4], 91, 92, 93, 94, 95, 96)) == 0  # 0.4 of it
    assert gateway.place(ask(2, *PROMPT[:3], 81, 82, 83, 84, 85, 86, 87)) == 1  # 0.3 is not above 0.3
    assert gateway.place(ask(3, tokens=700)) == 1


@pytest.mark.parametrize(
    ("loads", "uneven"),
    [
        ([64, 0, 10], False),  # 64 is not above 64
        ([65, 0, 10], True),
        ([200, 135, 180], False),  # 200 is not above 1.5 · 135
        ([210, 135, 180], True),
    ],
)
def test_cache_aware_ignores_matches_under_load_imbalance(loads: list[int], uneven: bool) -> None:
    gateway = Gateway(CacheAware(Switch()), states(3))
    gateway.finish(ask(0, *PROMPT), 0)
    for state, load in zip(gateway.replicas, loads, strict=True):
        state.in_flight = load

    assert gateway.place(ask(1, *PROMPT)) == (1 if uneven else 0)
    gateway.replicas[0].in_flight = gateway.replicas[1].in_flight
    assert gateway.place(ask(2, *PROMPT)) == 0, "what was sent elsewhere is in the tree, behind the first owner"


def test_cache_aware_kv_triggers_are_off_by_default() -> None:
    def chosen(switch: Switch, *shares: float) -> int:
        gateway = Gateway(CacheAware(switch), states(2, report=[Report(kv_share=share) for share in shares]))
        gateway.finish(ask(0, *PROMPT), 0)
        return gateway.place(ask(1, *PROMPT))

    assert chosen(Switch(), 1.0, 0.0) == 0
    assert chosen(Switch(kv_spread=0.5), 0.75, 0.25) == 0
    assert chosen(Switch(kv_spread=0.5), 0.76, 0.25) == 1
    assert chosen(Switch(kv_overload=0.9), 0.91, 0.9) == 1


def test_cache_aware_breaks_load_ties_by_selection_count() -> None:
    gateway = Gateway(CacheAware(Switch()), states(3))
    for n in (0, 1, 2, 3):
        gateway.finish(ask(n, 100 + n), gateway.rival.choose(ask(n, 100 + n), gateway.replicas, 0.0, gateway.rng))

    assert gateway.place(ask(9, 500)) == 1


def test_cache_aware_match_of_a_lost_replica_goes_to_the_first_without_learning() -> None:
    gateway = Gateway(CacheAware(Switch()), states(3, in_flight=[9, 9, 0]))
    gateway.put(ask(0, *PROMPT), 2)
    gateway.replicas[2].alive = False

    assert [gateway.place(ask(n, *PROMPT)) for n in (1, 2, 3)] == [0, 0, 0]
    gateway.replicas[2].alive = True
    assert gateway.place(ask(4, *PROMPT)) == 2


def test_cache_aware_tree_eviction_moves_matches_to_another_owner() -> None:
    gateway = Gateway(CacheAware(Switch(tree_tokens=2 * 512, eviction_s=30.0)), states(2))
    gateway.finish(ask(0, 1, 2), 0)
    gateway.finish(ask(1, 3, 4), 0)
    gateway.finish(ask(2, 1, 2), 1)

    gateway.now = 29.9
    assert gateway.place(ask(3, 1, 2)) == 0
    gateway.end(3)
    gateway.finish(ask(4, 3, 4), 0)
    gateway.now = 30.0
    assert gateway.place(ask(5, 1, 2)) == 1, "the first owner has more than 1,024 tokens: 1 and 2 were used before"
    gateway.end(5)
    gateway.finish(ask(6, 5, 6), 1)
    gateway.now = 60.0
    gateway.replicas[0].in_flight = 0
    gateway.replicas[1].in_flight = 1
    assert gateway.place(ask(7, 1, 2)) == 0, "nobody has it any more, so the least loaded"


def test_cache_aware_with_engine_events_takes_any_longest_match() -> None:
    caches = [{1}, {1, 2}, {1, 2}, {9}]
    gateway = Gateway(CacheAware(Switch(events=True)), states(4, cached=caches, in_flight=[0, 8, 7, 3]))

    assert gateway.place(ask(1, *range(1, 11))) == 2
    assert gateway.place(ask(2, 50, 51)) == 0
