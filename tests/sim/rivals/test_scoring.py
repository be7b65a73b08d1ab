"""Policies that add or multiply scores, by hand from their published formulas."""

from collections import Counter
from random import Random

import pytest
from tests.sim.rivals.fleet import Gateway, Known, ask, states, waiting

from forebay.sim.rivals import Report, RoutedRequest, State
from forebay.sim.rivals.dynamo import KvRouter, Weights
from forebay.sim.rivals.gie import Scorers, TokenLoad
from forebay.sim.rivals.lmetric import LMetric
from forebay.sim.rivals.oracle import Oracle
from forebay.sim.rivals.production_stack import LoadAware, PrefixAware

TEN = tuple(range(10))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((2.0, 2.0, 3.0), 2),  # 2·1 + 2·0.5 + 3·0 = 3; 2·0.5 + 2·0.8 + 3·0.4 = 3.8; 2·0 + 2·1 + 3·0.7 = 4.1
        ((3.0, 2.0, 2.0), 0),  # 4; 3.9; 3.4
        ((1.0, 3.0, 1.0), 2),  # 2.5; 3.3; 3.7
        ((3.0, 3.0, 1.0), 0),  # 4.5; 4.3; 3.7
    ],
)
@pytest.mark.parametrize("events", [False, True])
def test_scores_of_the_endpoint_picker(weights: tuple[float, float, float], expected: int, events: bool) -> None:
    rival = Scorers(*weights, events=events)
    reports = [Report(waiting=waits, kv_share=share) for waits, share in zip((0, 4, 8), (0.5, 0.2, 0.0), strict=True)]
    gateway = Gateway(rival, states(3, report=reports, cached=[set(), set(TEN[:4]), set(TEN[:7])]))
    gateway.finish(ask(0, *TEN[:4]), 1)
    gateway.finish(ask(1, *TEN[:7]), 2)

    assert gateway.place(ask(2, *TEN)) == expected


def test_the_endpoint_picker_draws_among_equals_and_does_not_see_what_it_has_sent() -> None:
    gateway = Gateway(Scorers(), states(4, report=waiting(3, 3, 3, 3)))
    chosen = Counter(gateway.place(ask(n, n)) for n in range(200))
    assert min(chosen.values()) > 25

    gateway = Gateway(Scorers(), states(4, report=waiting(3, 3, 2, 3)))
    assert {gateway.place(ask(n, n)) for n in range(50)} == {2}, "all, until the next scrape"


def test_the_index_of_the_endpoint_picker_forgets_beginnings_first_and_counts_what_is_left() -> None:
    small = [Report(kv_tokens=2 * 512)] * 2
    gateway = Gateway(Scorers(0.0, 0.0, 1.0, remembers=1.0), states(2, report=small))
    gateway.finish(ask(0, 1, 2, 3), 1)
    assert {gateway.rival.choose(ask(1, 1, 2, 3), gateway.replicas, 0.0, gateway.rng) for _ in range(40)} == {0, 1}

    gateway.finish(ask(2, 1), 0)  # so there is one who has the first block
    assert gateway.place(ask(3, 1, 2, 3)) == 1

    gateway = Gateway(Scorers(0.0, 0.0, 1.0), states(2, report=small))
    gateway.finish(ask(0, 1, 2, 3), 1)
    assert gateway.place(ask(1, 1, 2, 3)) == 1, "as shipped it remembers four times what the engine holds"


def test_the_endpoint_picker_compares_only_the_first_131072_tokens() -> None:
    long = tuple(range(300))
    gateway = Gateway(Scorers(0.0, 0.0, 1.0), states(2))
    gateway.finish(ask(0, *long[:256]), 0)
    gateway.finish(ask(1, *long), 1)

    assert {gateway.rival.choose(ask(2, *long), gateway.replicas, 0.0, gateway.rng) for _ in range(40)} == {0, 1}


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([9000, 5000, 0, 0], 1),  # holders of 80 % of the prompt, less work first
        ([290_000, 290_000, 2000, 5000], 2),  # later by 288,000 tokens, above 18 s · 15,928
        ([280_000, 280_000, 2000, 5000], 0),  # 278,000 is below it; 0 holds one block more
    ],
)
def test_prefix_holders_keep_a_prompt_unless_much_more_loaded(loads: list[int], expected: int) -> None:
    caches = [set(TEN[:9]), set(TEN[:8]), set(TEN[:7]), set()]
    gateway = Gateway(TokenLoad(), states(4, cached=caches))
    for at, load in enumerate(loads):
        gateway.put(ask(at, tokens=load or 1), at)

    assert gateway.place(ask(9, *TEN)) == expected


def test_prompt_without_a_holder_goes_to_the_least_queued_prefill_work() -> None:
    gateway = Gateway(TokenLoad(), states(2, cached=[set(), {0}]))
    gateway.put(ask(0, tokens=300), 0)
    gateway.put(ask(1, tokens=100), 1)
    assert gateway.place(ask(2, *TEN)) == 1
    gateway.end(1)
    assert gateway.place(ask(3, 77)) == 0
    gateway.begin(2)
    assert gateway.place(ask(4, 78)) == 1


def routed(weights: Weights, *, active: tuple[int, ...] = (10, 5, 9)) -> list[float]:
    """Costs of a prompt of ten blocks where replicas hold 2, 5 and 8 of them and so many others are in use."""
    caches = [set(TEN[:depth]) for depth in (2, 5, 8)]
    gateway = Gateway(KvRouter(weights), states(3, cached=caches))
    for at, count in enumerate(active):
        gateway.put(ask(at, *range(100 * at + 100, 100 * at + 100 + count)), at)
        gateway.begin(at)
    assert isinstance(gateway.rival, KvRouter)
    return gateway.rival.costs(ask(9, *TEN), gateway.replicas, 0.0)


def test_costs_of_the_kv_router() -> None:
    """The example of its documentation, whose decode blocks leave out those of the request, 10 everywhere."""
    assert routed(Weights()) == [8 + 10 + 10, 5 + 5 + 10, 2 + 9 + 10]
    assert routed(Weights(2.0)) == [16 + 20, 10 + 15, 4 + 19]
    assert routed(Weights(credit=0.5)) == [9 + 20, 7.5 + 15, 6 + 19]
    assert routed(Weights(events=False)) == [10 + 20, 10 + 15, 10 + 19]


def test_the_kv_router_counts_prompts_until_they_are_read_and_shared_blocks_once() -> None:
    gateway = Gateway(KvRouter(Weights()), states(2, cached=[set(TEN[:3]), set()]))
    assert isinstance(gateway.rival, KvRouter)

    def costs(*blocks: int) -> list[float]:
        assert isinstance(gateway.rival, KvRouter)
        return gateway.rival.costs(ask(99, *blocks), gateway.replicas, 0.0)

    gateway.put(ask(0, *TEN[:4]), 0)  # one block of four is new
    assert costs(*TEN) == [(1 + 10 - 3) + (4 + 6), 10 + 10]
    gateway.begin(0)
    assert costs(*TEN) == [(10 - 3) + (4 + 6), 10 + 10]
    gateway.put(ask(1, tokens=700), 1)  # two blocks of which nothing is known
    assert costs(7)[1] == (700 + 512) / 512 + 3
    gateway.end(1)
    gateway.end(0)
    assert costs(*TEN) == [7 + 10, 10 + 10]


def test_credit_of_the_kv_router_fades_with_the_excess_of_the_queue() -> None:
    gateway = Gateway(KvRouter(Weights(decay=1.0)), states(2, cached=[set(TEN), set()]))
    gateway.put(ask(0, *range(50, 60)), 0)  # as much as the next prompt: half of the credit
    assert isinstance(gateway.rival, KvRouter)

    assert gateway.rival.costs(ask(1, *TEN), gateway.replicas, 0.0) == [20 - 5 + 20, 10 + 10]


def test_kv_router_predicts_sent_prompts_as_cached_for_a_while() -> None:
    gateway = Gateway(KvRouter(Weights(predicted_s=5.0)), states(2))
    gateway.finish(ask(0, *TEN), 1)
    assert gateway.place(ask(1, *TEN)) == 1
    gateway.end(1)
    gateway.now = 5.0
    assert {gateway.rival.choose(ask(2, *TEN), gateway.replicas, 5.0, gateway.rng) for _ in range(40)} == {0, 1}


def test_kv_router_with_a_temperature_prefers_cheaper_replicas() -> None:
    gateway = Gateway(KvRouter(Weights(temperature=0.5)), states(3, cached=[set(TEN), set(TEN[:5]), set()]))
    chosen = Counter(gateway.rival.choose(ask(n, *TEN), gateway.replicas, 0.0, gateway.rng) for n in range(3000))

    assert chosen[0] / chosen[1] == pytest.approx(2.718, rel=0.15)  # costs scaled to 0, 0.5 and 1, over 0.5
    assert chosen[1] / chosen[2] == pytest.approx(2.718, rel=0.2)


def test_lmetric_multiplies_the_tokens_to_be_read_by_the_requests() -> None:
    gateway = Gateway(LMetric(), states(3, cached=[set(TEN[:8]), set(TEN[:5]), set()]))
    for n, at in enumerate((0, 0, 0, 0, 1)):
        gateway.put(ask(n, tokens=100), at)

    assert gateway.place(ask(9, *TEN)) == 2  # (400 + 1024) · 5 = 7120; (100 + 2560) · 2 = 5320; 5120 · 1
    gateway.begin(4)
    assert gateway.place(ask(10, *TEN)) == 1  # 2560 · 2 = 5120, below (5120 + 5120) · 2


def test_lmetric_may_use_reported_load() -> None:
    reports = [Report(waiting=1, running=2, waiting_tokens=200), Report(running=1)]
    gateway = Gateway(LMetric(reported=True), states(2, report=reports, cached=[set(TEN[:8]), set(TEN[:5])]))

    assert gateway.place(ask(0, *TEN)) == 0  # (200 + 1024) · 4 = 4896; 2560 · 2 = 5120
    gateway.replicas[0].report = Report(waiting=1, running=2, waiting_tokens=300)
    assert gateway.place(ask(1, *TEN)) == 1  # 5296; what was sent since does not count


def test_prefix_aware_draws_among_longest_matches() -> None:
    gateway = Gateway(PrefixAware(), states(4))
    for n, (at, depth) in enumerate([(0, 2), (1, 5), (2, 5)]):
        gateway.finish(ask(n, *TEN[:depth]), at)
    chosen = Counter(gateway.rival.choose(ask(9, *TEN), gateway.replicas, 0.0, gateway.rng) for _ in range(200))
    assert set(chosen) == {1, 2}
    assert min(chosen.values()) > 70

    gateway.replicas[1].alive = gateway.replicas[2].alive = False
    assert gateway.place(ask(10, *TEN)) == 0


def test_prefix_aware_with_a_threshold_takes_the_lowest_rate_for_short_matches() -> None:
    gateway = Gateway(PrefixAware(match_tokens_min=1024), states(3))
    assert [gateway.place(ask(n, 0, 100 + n)) for n in range(4)] == [0, 1, 2, 0]
    gateway.now = 61.0
    assert gateway.place(ask(4, 0, 100)) == 0, "a match of 1,024 tokens"
    assert [gateway.place(ask(n, 0, 100 + n)) for n in (5, 6)] == [1, 2], "older requests are out of the window"


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 1), (0.4, 0)])
def test_load_aware_weighs_the_share_of_the_prompt_against_the_relative_load(beta: float, expected: int) -> None:
    """Mean 4, so 0.9 - beta · (7 - 4)/4 against 0.4 - beta · (3 - 4)/4 and -beta · (2 - 4)/4."""
    caches = [set(TEN[:9]), set(TEN[:4]), set()]
    gateway = Gateway(LoadAware(beta=beta), states(3, cached=caches, in_flight=[7, 3, 2]))

    assert gateway.place(ask(0, *TEN)) == expected


def test_oracle_minimises_first_token_last_token_or_priced_time() -> None:
    truths = [Known(5.0, 0.5, 0.02), Known(0.0, 4.6, 0.2), Known(1.0, 2.6, 0.01)]
    replicas: list[State] = states(3, truth=truths)
    request: RoutedRequest = ask(0, *TEN, output_tokens=100)

    def chosen(oracle: Oracle) -> int:
        return oracle.choose(request, replicas, 0.0, Random(0))

    assert chosen(Oracle()) == 2  # 5.5 s, 4.6 s and 3.6 s to the first token
    assert chosen(Oracle(to_the_end=True)) == 2  # and 2 s, 20 s and 1 s to the last
    assert chosen(Oracle(price=1.0)) == 0  # or 0.5 s, 4.6 s and 2.6 s once more
    replicas[2].alive = False
    assert chosen(Oracle()) == 1
    assert chosen(Oracle(to_the_end=True)) == 0
    replicas[1].truth = None
    with pytest.raises(ValueError, match="chat-1"):
        chosen(Oracle())
