"""Every request of a replay is answered once or rejected under every policy, deterministically."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.model import Policy
from forebay.sim.engine import hardware
from forebay.sim.load.change import first
from forebay.sim.load.made import hot_prefix
from forebay.sim.load.named import workload
from forebay.sim.load.traces.lines import TOKENS_MAX
from forebay.sim.load.values import Arrival, Workload
from forebay.sim.loop import run
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.outcome import Outcome, Slo, summary
from forebay.sim.replay.run import _Replay, _Wires, replay

SLO = Slo(5.0, 0.1)
SHORT = SimCluster(replicas=2)
POLICIES = [*Policy, "plain_random", "smg_cache_aware", "gie", "llm_d", "dynamo", "lmetric", "oracle"]

ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.floats(0, 5),
        st.integers(1, 3000),
        st.integers(1, 40),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from(["", "interactive", "batch"]),
    ),
    max_size=12,
).map(lambda some: Workload("some", tuple(sorted(some, key=lambda each: each.at_s))))


def columns(outcome: Outcome) -> list[list[float]]:
    return [
        list(column)
        for column in (outcome.arrived_at, outcome.first_at, outcome.ended_at, outcome.replica, outcome.cached_tokens)
    ]


@given(
    workload=ARRIVALS,
    policy=st.sampled_from(POLICIES),
    gateways=st.integers(1, 3),
    report_every_s=st.sampled_from([0.05, 0.25, 2.0]),
    reports_blocks=st.booleans(),
)
@settings(max_examples=60)
def test_every_request_is_answered_once_by_one_replica_after_its_arrival(
    workload: Workload, policy: str, gateways: int, report_every_s: float, reports_blocks: bool
) -> None:
    cluster = SimCluster(replicas=3, gateways=gateways, report_every_s=report_every_s, reports_blocks=reports_blocks)
    outcome = replay(workload, cluster, policy=policy)

    assert list(outcome.arrived_at) == [each.at_s for each in workload.arrivals]
    assert outcome.codes == ["ok"] * len(workload.arrivals)
    assert sum(replica.requests for replica in outcome.replicas) == len(workload.arrivals)
    for at, first_at, ended_at in zip(outcome.arrived_at, outcome.first_at, outcome.ended_at, strict=True):
        assert at < first_at <= ended_at <= outcome.lasted_s
    hit = sum(replica.hit_tokens for replica in outcome.replicas)
    read = hit + sum(replica.prefilled_tokens for replica in outcome.replicas)
    again = read - sum(each.prompt_tokens for each in workload.arrivals)
    if any(each.band == "batch" for each in workload.arrivals):  # one that gives way begins again elsewhere
        assert again >= 0
        assert sum(outcome.cached_tokens) <= hit
    else:
        assert (again, sum(outcome.cached_tokens)) == (0, hit)


@pytest.mark.parametrize("policy", ["cpr", "p2c", "plain_random"])
def test_outcome_is_determined_by_the_seed(policy: str) -> None:
    load = hot_prefix(Random(1), requests=60)
    cluster = SimCluster(replicas=3, gateways=2)
    one, same, other = (columns(replay(load, cluster, policy=policy, seed=seed)) for seed in (1, 1, 2))

    assert one == same
    assert one != other


def test_single_request_latency_is_the_sum_of_its_steps() -> None:
    outcome = replay(Workload("one", (Arrival(7.0, 1000, 3),)), SHORT, policy="cpr")
    step_s = hardware("h100_sxm", "70B", 4).step.step_s

    assert outcome.first_at[0] == pytest.approx(7.0 + step_s(1000, 1000 * 500, 0, 0))
    assert outcome.ended_at[0] == pytest.approx(outcome.first_at[0] + step_s(1, 0, 1001, 1) + step_s(1, 0, 1002, 1))
    assert outcome.lasted_s == outcome.ended_at[0]


@pytest.mark.parametrize("policy", ["cpr", "plain_least_requests"])
def test_only_prompts_that_fit_nowhere_are_rejected(policy: str) -> None:
    load = Workload("large", (Arrival(0.0, 10, 5), Arrival(0.1, 5000, 5), Arrival(0.2, 10, 5)))
    outcome = replay(load, SimCluster(replicas=2, kv_tokens=4096), policy=policy)

    assert outcome.codes == ["ok", "context_length_exceeded", "ok"]
    assert math.isnan(outcome.first_at[1])
    assert summary(outcome, SLO).refused == {"context_length_exceeded": 1}


def test_queue_timeout_applies_to_forebay_but_not_to_rivals() -> None:
    load = Workload("many", tuple(Arrival(n / 100, 100, 500) for n in range(20)))
    cluster = SimCluster(replicas=1, sequences_max=2, queue_timeout_s=5.0)

    assert summary(replay(load, cluster, policy="cpr"), SLO).refused.keys() == {"queue_timeout"}
    assert not summary(replay(load, cluster, policy="plain_least_requests"), SLO).refused


def test_replay_progress_is_reported_and_monotonic() -> None:
    told: list[int] = []
    replay(hot_prefix(Random(1), requests=600), SHORT, policy="cpr", progress=told.append)

    assert told
    assert told == sorted(told)


def test_pauses_between_requests_add_no_timers() -> None:
    polled_at: Counter[float] = Counter()

    class Counting(_Replay):
        def _poll(self) -> None:
            polled_at[self._loop.time()] += 1
            super()._poll()

    sparse = Workload("sparse", [Arrival(0.4 * at, 64, 8) for at in range(100)])
    cluster, wires = SimCluster(replicas=1, report_every_s=5.0), _Wires()
    run(Counting(sparse, cluster, "cpr", 0, None).run(wires, lambda _: None), seconds_max=math.inf, network=wires)

    assert polled_at
    assert set(polled_at.values()) == {1}


def test_slower_replica_gets_less_traffic_from_forebay() -> None:
    load = hot_prefix(Random(1), requests=400)
    outcome = replay(load, SimCluster(replicas=4, speeds=(1.0, 0.4)), policy="cpr")
    requests = [replica.requests for replica in outcome.replicas]

    assert requests[1] + requests[3] < 0.7 * (requests[0] + requests[2])


def test_prefix_shared_by_all_collapses_longest_prefix_routing_but_not_cpr() -> None:
    """All prompts of Mooncake's conversation trace begin with the same block."""
    load = first(workload("mooncake", Random(0)), 400)
    theirs = replay(load, SimCluster(), policy="production_stack")
    ours = replay(load, SimCluster(), policy="cpr")

    assert max(Counter(theirs.replica).values()) == 400
    assert len(Counter(ours.replica)) == 8
    assert summary(ours, SLO).imbalance <= 1.3


@pytest.mark.parametrize("tokens", [2_500_000, TOKENS_MAX])
def test_prompt_larger_than_every_kv_cache_is_rejected(tokens: int) -> None:
    arrivals = (Arrival(0.0, tokens, 5), Arrival(1.0, 10, 5))
    outcome = replay(Workload("long", arrivals), SHORT, policy="cpr")

    assert outcome.codes == ["context_length_exceeded", "ok"]
