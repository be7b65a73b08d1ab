"""Synthetic workloads have the properties that their names promise."""

from collections import Counter, defaultdict
from itertools import pairwise
from random import Random

import pytest

from forebay.sim.load.describe import describe
from forebay.sim.load.made import CONTEXT_TOKENS_MAX, Length, at_random, burst, hot_prefix, multi_turn, tenants
from forebay.sim.load.values import Arrival, Workload

MADE = (at_random, burst, hot_prefix, tenants, multi_turn)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_prompts_have_all_their_blocks_and_block_ids_determine_the_prefix(make: type) -> None:
    workload: Workload = make(Random(3))
    before: dict[int, tuple[int, ...]] = {}

    times = [arrival.at_s for arrival in workload.arrivals]
    assert times == sorted(times)
    for arrival in workload.arrivals:
        assert 1 <= arrival.prompt_tokens <= CONTEXT_TOKENS_MAX
        assert arrival.output_tokens >= 1
        assert len(arrival.blocks) in (0, -(-arrival.prompt_tokens // workload.block_tokens))
        for place, block in enumerate(arrival.blocks):
            assert before.setdefault(block, arrival.blocks[:place]) == arrival.blocks[:place]


def test_generated_arrivals_have_the_requested_rate_and_variation() -> None:
    even, bursts = (
        describe(at_random(Random(1), requests=20_000)),
        describe(at_random(Random(1), requests=20_000, cv=4)),
    )

    for figures, cv, off in ((even, 1, 0.03), (bursts, 4, 0.1)):
        assert figures.gap_cv == pytest.approx(cv, rel=off)
        assert figures.rate_per_s == pytest.approx(20, rel=off)
    assert even.prompt_tokens.p50 == pytest.approx(1_000, rel=0.05)


def test_hot_prefix_is_shared_by_most_requests_only() -> None:
    workload = hot_prefix(Random(1))
    begins = Counter(arrival.blocks[:16] for arrival in workload.arrivals)
    (hot, most), *others = begins.most_common()

    assert len(hot) == 16
    assert most == pytest.approx(3_600, abs=60)
    assert {count for _, count in others} == {1}
    assert describe(workload).hit_share == pytest.approx(0.9 * 8_192 / 8_680, rel=0.02)


@pytest.mark.parametrize(("users", "distinct"), [(5, 750), (0, 4_000)])
def test_tenant_workload_has_a_prefix_per_tenant_and_a_prompt_per_user(users: int, distinct: int) -> None:
    workload = tenants(Random(1), users=users)
    prefixes = defaultdict(set)
    for arrival in workload.arrivals:
        prefixes[arrival.tenant].add(arrival.blocks[: 6_000 // 512])

    assert (len(prefixes), {len(own) for own in prefixes.values()}) == (150, {1})
    assert len({*map(tuple, prefixes.values())}) == 150
    assert len({arrival.blocks for arrival in workload.arrivals}) == pytest.approx(distinct, rel=0.02)
    assert {arrival[1:3] for arrival in workload.arrivals} == {(7_200, 1_000)}


def test_conversation_prompts_grow_by_the_answer_and_the_next_question() -> None:
    workload = multi_turn(
        Random(1), span_s=40_000, rate_per_s=2e-4, turns=1e9, question=Length(600), output=Length(300)
    )
    talks: dict[int, list[Arrival]] = defaultdict(list)
    for arrival in workload.arrivals:
        talks[arrival.blocks[2]].append(arrival)  # the first behind the system prompt
    longest = max(talks.values(), key=len)

    assert len(talks) > 3
    assert [arrival.prompt_tokens for arrival in longest[:3]] == [1_624, 2_524, 3_424]
    assert longest[-1].prompt_tokens + 300 <= CONTEXT_TOKENS_MAX < longest[-1].prompt_tokens + 300 + 900
    for before, after in pairwise(longest):
        whole = before.prompt_tokens // 512
        assert after.blocks[:whole] == before.blocks[:whole]
        assert after.at_s > before.at_s + 300 * 0.03


def test_conversations_share_a_system_prompt_and_overlap() -> None:
    workload = multi_turn(Random(1), span_s=3_000)
    figures = describe(workload)

    assert len({arrival.blocks[:2] for arrival in workload.arrivals}) == 1
    assert len({arrival.blocks[2:3] for arrival in workload.arrivals}) > 5_000
    assert figures.span_s < 3_000
    assert figures.rate_per_s == pytest.approx(2 * 5, rel=0.1)
    assert figures.gap_cv == pytest.approx(1, rel=0.1)
