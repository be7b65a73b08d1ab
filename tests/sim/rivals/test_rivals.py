"""Invariants of all rival policies, and the known weakness of one of them."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.routing.test_cpr import Fleet, Prompt
from tests.sim.rivals.fleet import Gateway, Known, ask, states

from forebay.core.model import Policy
from forebay.sim.rivals import RIVALS, Report, RoutedRequest

STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "begin", "end", "kill", "heal", "report"]), st.integers(0, 7)),
    max_size=40,
)


def chain(number: int) -> tuple[int, ...]:
    """A prompt that shares its beginning with some others."""
    return tuple(10 * depth + number % (depth + 1) for depth in range(1 + number % 5))


def play(name: str, steps: list[tuple[str, int]], seed: int) -> list[int]:
    """Which replicas requests went to; one that is not alive fails in `Gateway.put`."""
    truths = [Known(at, 1.0, 0.01) for at in range(4)]
    gateway = Gateway(RIVALS[name].make(), states(4, truth=truths), rng=Random(seed))
    placed = []
    for id, (what, number) in enumerate(steps):
        gateway.now += 7.0 * number
        replica = gateway.replicas[number % 4]
        if what == "ask":
            placed.append(gateway.place(ask(id, *chain(number), tenant=str(number), output_tokens=number)))
        elif what == "kill":
            replica.alive = sum(one.alive for one in gateway.replicas if one is not replica) == 0
        elif what == "heal":
            replica.alive = True
        elif what == "report":
            replica.report = Report(gateway.now, number, 2 * number, 100 * number, number / 8, 4096)
            replica.cached = set(chain(number))
        elif number < len(gateway.open):
            {"begin": gateway.begin, "end": gateway.end}[what](list(gateway.open)[number])
    for id in list(gateway.open):
        gateway.begin(id)
        gateway.end(id)
    return placed


@pytest.mark.parametrize("name", RIVALS)
@given(steps=STEPS, seed=st.integers(0, 3))
def test_only_live_replicas_are_chosen_and_the_same_ones_with_the_same_seed(
    name: str, steps: list[tuple[str, int]], seed: int
) -> None:
    assert play(name, steps, seed) == play(name, steps, seed)


@pytest.mark.parametrize("name", RIVALS)
def test_no_replica_is_chosen_without_a_live_one(name: str) -> None:
    rival = RIVALS[name].make()
    with pytest.raises(ValueError, match="no replica is alive"):
        rival.choose(ask(0, 1), states(2, alive=[False, False]), 0.0, Random(0))
    with pytest.raises(ValueError, match="no replica is alive"):
        rival.choose(ask(0, 1), [], 0.0, Random(0))


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_document_their_source_and_variants_their_changes(name: str) -> None:
    row = RIVALS[name]
    shipped, _, variant = name.partition(".")

    assert row.source
    assert bool(row.changed) is bool(variant)
    assert not RIVALS[shipped].changed
    assert name not in set(Policy), "a policy of ours could not be told from it"


def block_0() -> list[RoutedRequest]:
    """Requests that share nothing but their first block, as all 12,031 of the Mooncake conversation trace do."""
    return [ask(n, 0, *range(100 * n + 1, 100 * n + 10)) for n in range(400)]


def test_prefix_shared_by_all_collapses_pure_longest_prefix_routing() -> None:
    gateway = Gateway(RIVALS["production_stack"].make(), states(8))
    placed = Counter(gateway.place(request) for request in block_0())

    assert list(placed.values()) == [400]


def test_prefix_shared_by_all_does_not_collapse_cpr() -> None:
    """The same requests, one every 180 ms: nine tenths of what eight such replicas can do."""
    prompts = [Prompt(0.18 * request.id, request.blocks, 0) for request in block_0()]
    placed = Counter(Fleet(Policy.CPR, [1000.0] * 8).run(prompts).placed)

    assert len(placed) == 8
    assert max(placed.values()) <= 1.5 * 400 / 8


@pytest.mark.parametrize("name", ["gie", "smg_cache_aware", "dynamo", "lmetric", "llm_d", "plain_hash.2"])
def test_prefix_shared_by_all_does_not_collapse_load_aware_rivals(name: str) -> None:
    gateway = Gateway(RIVALS[name].make(), states(8))
    placed = Counter[int]()
    for request in block_0():
        gateway.now += 0.08
        at = gateway.place(request)
        placed[at] += 1
        replica = gateway.replicas[at]
        replica.cached = {*replica.cached, *request.blocks}
        replica.report = Report(gateway.now, waiting=replica.in_flight)
        if request.id >= 50:
            gateway.begin(request.id - 50)
            gateway.end(request.id - 50)

    assert max(placed.values()) < 100
