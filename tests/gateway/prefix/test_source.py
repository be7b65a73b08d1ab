"""How a gateway knows what a replica holds: by its word, exact or estimated, or by what was sent there itself."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.rig import ROUTES
from tests.net.rig import run

from forebay.core.model import BlockNews, Policy, Replica, ReplicaState
from forebay.core.routing import RoutingRequest, Source
from forebay.gateway.account import Account
from forebay.gateway.fleet import Served
from forebay.gateway.link import Link
from forebay.net.client import Pool
from forebay.obs.metrics import Metrics

ASK = RoutingRequest(seed=0, tokens=450, blocks=(1, 2, 3, 4), block_tokens=100)


def on_loop(check: Callable[[Served, Link], None]) -> None:
    """Check a model with one replica."""

    async def main() -> None:
        served = Served(replace(ROUTES, policy=Policy.CPR), Account(Metrics(), "chat"))
        replica = Replica("chat-0", 1, "r1", "127.0.0.1", 1, ReplicaState.READY)
        async with asyncio.TaskGroup() as group:
            check(served, served.link(replica, Pool("127.0.0.1", 1, group)))

    run(main())


@pytest.mark.parametrize(
    ("hit_tokens", "expected"),
    [(0, ""), (1, Source.ESTIMATED), (199, Source.ESTIMATED), (299, Source.ESTIMATED), (300, Source.PREDICTED),
     (450, Source.PREDICTED)],
)  # fmt: skip
def test_source_of_a_hit_is_that_of_its_last_block(hit_tokens: int, expected: str) -> None:
    def check(served: Served, link: Link) -> None:
        assert served.apply_blocks(link, BlockNews(9, True, True, (1, 2)), 1.0) == ""
        assert link.blocks_seq == 9
        served.pricing.index.note(link.meter.mask, ASK.blocks, 1.0)
        assert served.source(link, ASK, hit_tokens) == expected
        assert served.source(link, RoutingRequest(seed=0, tokens=450, block_tokens=100), hit_tokens) == ""
        assert served.source(link, None, hit_tokens) == ""

    on_loop(check)


def test_hit_reported_by_an_engine_is_exact() -> None:
    def check(served: Served, link: Link) -> None:
        assert served.apply_blocks(link, BlockNews(9, True, False, (1, 2)), 1.0) == ""
        assert served.source(link, ASK, 200) == Source.EXACT

    on_loop(check)


def test_replica_with_an_invalid_report_is_predicted_from_then_on() -> None:
    def check(served: Served, link: Link) -> None:
        assert served.apply_blocks(link, BlockNews(9, True, False, (1, 2)), 1.0) == ""
        assert "does not follow" in served.apply_blocks(link, BlockNews(8, False, False, (3,)), 1.0)
        mask, index = link.meter.mask, served.pricing.index
        assert index.depths(ASK.blocks, [mask]) == [0]
        assert served.apply_blocks(link, BlockNews(9, True, False, (1, 2)), 1.0) == ""
        assert index.depths(ASK.blocks, [mask]) == [0]
        served.pricing.index.note(mask, ASK.blocks, 1.0)
        assert served.source(link, ASK, 400) == Source.PREDICTED

    on_loop(check)


def test_block_report_of_a_removed_replica_is_ignored() -> None:
    def check(served: Served, link: Link) -> None:
        served.unlink(link)
        assert served.apply_blocks(link, BlockNews(9, True, False, (1, 2)), 1.0) == ""
        served.doubt_blocks(link)
        assert len(served.pricing.index) == 0
        assert served.pricing.index.join() == link.meter.mask

    on_loop(check)


NUMBERS = st.integers(-2, 12) | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64])
REPORTS = st.builds(
    BlockNews, NUMBERS, st.booleans(), st.booleans(), st.lists(NUMBERS).map(tuple), st.lists(NUMBERS).map(tuple)
)


@given(st.lists(REPORTS, max_size=6))
def test_index_contains_only_reported_hashes_after_any_reports(reports: list[BlockNews]) -> None:
    def check(served: Served, link: Link) -> None:
        for now, report in enumerate(reports):
            believed = link.blocks_seq is not None
            problem = served.apply_blocks(link, report, float(now))
            assert (link.blocks_seq is None) is (bool(problem) or not believed)
        named = {block for report in reports for block in report.stored if 0 <= block < 2**64}
        assert len(served.pricing.index) <= len(named)

    on_loop(check)
