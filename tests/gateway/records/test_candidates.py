"""What is written down of the replicas that a choice looked at."""

import asyncio
from dataclasses import replace

import pytest
from tests.gateway.rig import ROUTES
from tests.net.rig import run

from forebay.core.model import Policy, Replica, ReplicaState
from forebay.core.routing import Route, RoutingRequest, Why
from forebay.core.routing.cpr import scores
from forebay.gateway.account import Account
from forebay.gateway.fleet import Served
from forebay.gateway.records import entries
from forebay.net.client import Pool
from forebay.obs.metrics import Metrics
from forebay.wire import records


@pytest.mark.parametrize(("handicap", "weight", "times"), [(1.0, 1.0, 1.0), (2.5, 1.0, 2.5), (2.5, 0.5, 5.0)])
@pytest.mark.parametrize("hit_tokens", [0, 300])
def test_decision_record_of_a_policy_without_scores_lists_the_compared_loads(
    handicap: float, weight: float, times: float, hit_tokens: int
) -> None:
    async def main() -> None:
        served = Served(replace(ROUTES, policy=Policy.PREFIX_AFFINITY), Account(Metrics(), "chat"))
        async with asyncio.TaskGroup() as group:
            for n in range(3):
                each = Replica(f"chat-{n}", 1, "r1", "127.0.0.1", 1 + n, ReplicaState.READY)
                served.links.append(served.link(each, Pool("127.0.0.1", 1 + n, group)))
            slow = served.links[2]
            slow.load, slow.meter.handicap = 4, handicap
            slow.meter.weigh(weight)
            packed, others = entries.candidates(served.links, Route(1, Why.LONGEST_PREFIX, hit_tokens))
        found = records.candidates(packed)
        assert others == 0
        assert [(c.replica, c.load, c.hit_tokens) for c in found] == [
            ("chat-0", 0, 0), ("chat-1", 0, hit_tokens), ("chat-2", 4, 0),
        ]  # fmt: skip
        assert [c.handicap for c in found] == [1.0, 1.0, times]
        assert [c.total_s for c in found] == [0.0] * 3

    run(main())


@pytest.mark.parametrize("scored", [False, True])
def test_decision_record_of_many_candidates_has_the_chosen_one(scored: bool) -> None:
    count = records.CANDIDATES_MAX + 8

    async def main() -> None:
        served = Served(ROUTES, Account(Metrics(), "chat"))
        async with asyncio.TaskGroup() as group:
            for n in range(count):
                each = Replica(f"chat-{n:02}", 1, "r1", "127.0.0.1", 1 + n, ReplicaState.READY)
                served.links.append(served.link(each, Pool("127.0.0.1", 1 + n, group)))
            request = RoutingRequest(7, 100)
            equal = scores(served.links, range(count), request, served.pricing) if scored else None
            packed, others = entries.candidates(served.links, Route(count - 1, Why.DRAWN, terms=equal))
        found = [c.replica for c in records.candidates(packed)]
        assert others == 8
        assert len({*found}) == records.CANDIDATES_MAX
        assert f"chat-{count - 1}" in found

    run(main())
