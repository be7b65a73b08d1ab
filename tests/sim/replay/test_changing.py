"""Replicas added and removed during a replay: decisions take effect, no request is lost, and costs are counted."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.scaling.values import Reading
from forebay.sim.load.values import Arrival, Workload
from forebay.sim.replay.changing import LOOK_S, SPREAD, Sizing
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.outcome import Outcome, Slo, summary, turns
from forebay.sim.replay.run import replay

START_S = 3.0
CLUSTER = SimCluster(queue_timeout_s=600.0)
SLO = Slo(5.0, 0.1)


class Script:
    """So many at each look, the last number from then on; keeps what it was told."""

    def __init__(self, wanted: Sequence[int]) -> None:
        self.readings: list[Reading] = []
        self._wanted = wanted

    def size(self, reading: Reading | None, now: float, current: int) -> int:
        """The next number."""
        assert reading is not None
        self.readings.append(reading)
        return self._wanted[min(len(self.readings), len(self._wanted)) - 1]


def steady(requests: int, every_s: float = 0.5, prompt: int = 2000, output: int = 100) -> Workload:
    return Workload("steady", tuple(Arrival(at * every_s, prompt, output) for at in range(requests)))


def results_of(outcome: Outcome) -> list[object]:
    return [list(outcome.ended_at), outcome.sizes, outcome.replica_s, outcome.ready_s, outcome.started]


@settings(max_examples=25, deadline=None)
@given(
    wanted=st.lists(st.integers(0, 6), min_size=1, max_size=25),
    begin=st.integers(0, 4),
    gateways=st.integers(1, 3),
    requests=st.integers(1, 60),
)
def test_every_request_is_answered_once_under_any_decisions(
    wanted: list[int], begin: int, gateways: int, requests: int
) -> None:
    script = Script([*wanted, 1])
    sizing = Sizing(begin, script, START_S, on_demand=True)
    outcome = replay(steady(requests), CLUSTER.model_copy(update={"gateways": gateways}), policy="cpr", sizing=sizing)

    assert outcome.codes == ["ok"] * requests
    assert sum(each.requests for each in outcome.replicas) == requests
    assert len(outcome.replicas) <= begin + outcome.started
    assert outcome.ready_s <= outcome.replica_s
    assert sum(each.busy_s for each in outcome.replicas) <= outcome.ready_s + 1e-6
    assert all(size.ready <= size.there and size.ready <= size.wanted for size in outcome.sizes)


def test_outcome_and_start_times_are_determined_by_the_seed() -> None:
    one, same, other = (
        replay(steady(80), CLUSTER, policy="cpr", seed=seed, sizing=Sizing(1, Script([1, 3]), 10 * START_S))
        for seed in (1, 1, 2)
    )
    assert results_of(one) == results_of(same)
    assert one.sizes != other.sizes


def test_replica_serves_once_started_and_costs_from_its_order() -> None:
    script = Script([1, 2])
    outcome = replay(steady(60), CLUSTER, policy="cpr", sizing=Sizing(1, script, 10.0))
    ordered, ready = outcome.sizes[1], next(size for size in outcome.sizes if size.ready == 2)

    assert (ordered.at_s, ordered.wanted, ordered.ready, ordered.there) == (2 * LOOK_S, 2, 1, 2)
    took_s = ready.at_s - ordered.at_s
    assert took_s == pytest.approx(10.0, rel=4 * SPREAD)
    assert outcome.replica_s == pytest.approx(2 * outcome.lasted_s - 2 * LOOK_S)
    assert outcome.ready_s == pytest.approx(outcome.replica_s - took_s)
    assert all(each.requests for each in outcome.replicas)
    pending = [reading.pending for reading in script.readings]
    assert pending[2] == 1
    assert pending[-1] == 0
    assert script.readings[0].cold_start_s == 10.0


def test_removed_replica_gets_no_new_requests_and_finishes_its_own() -> None:
    outcome = replay(
        steady(30, prompt=100, output=400), CLUSTER, policy="round_robin", sizing=Sizing(2, Script([2, 2, 2, 2, 1]))
    )
    asked_at = 5 * LOOK_S
    gone = next(size.at_s for size in outcome.sizes if size.there == 1)
    of_it = [at for at, replica in enumerate(outcome.replica) if replica == 1]

    assert outcome.codes == ["ok"] * 30
    assert all(outcome.arrived_at[at] <= asked_at for at in of_it)
    assert max(outcome.ended_at[at] for at in of_it) > asked_at
    assert gone - LOOK_S <= max(outcome.ended_at[at] for at in of_it) <= gone


def test_requests_wait_for_a_cold_start_when_scaled_to_zero() -> None:
    outcome = replay(steady(1), CLUSTER, policy="cpr", sizing=Sizing(0, Script([1]), START_S, on_demand=True))

    assert outcome.codes == ["ok"]
    assert outcome.first_at[0] > START_S / 2


def test_reading_contains_arrivals_and_replica_load() -> None:
    script = Script([1])
    outcome = replay(steady(40), CLUSTER, policy="cpr", sizing=Sizing(1, script, START_S))
    middle = script.readings[10]

    assert sum(reading.arrivals for reading in script.readings) == 40
    assert middle.arrivals == 2
    assert middle.ready == 1
    assert middle.ttft_s is not None
    assert middle.tpot_s is not None
    assert middle.late == 0
    assert 0 < (middle.duty or 0) <= 1
    assert 0 < (middle.kv_use or 0) < 1
    assert middle.predicted_ttft_s is not None
    assert 0 < middle.predicted_ttft_s <= 2 * middle.ttft_s
    assert middle.predicted_tpot_s == pytest.approx(middle.tpot_s, rel=0.5)
    assert middle.gpus == CLUSTER.tensor_parallel
    assert sum((r.duty or 0) * r.since_s for r in script.readings) == pytest.approx(
        outcome.replicas[0].busy_s, rel=0.05
    )


def test_rival_policy_requires_a_fixed_number_of_replicas() -> None:
    assert replay(steady(4), CLUSTER, policy="gie", sizing=Sizing(3)).codes == ["ok"] * 4
    with pytest.raises(ValueError, match="gie knows no replicas"):
        replay(steady(4), CLUSTER, policy="gie", sizing=Sizing(3, Script([3])))


def test_fixed_sizing_gives_the_figures_of_a_replay_without_sizing() -> None:
    fixed = replay(steady(20), CLUSTER.model_copy(update={"replicas": 3}), policy="cpr")
    same = replay(steady(20), CLUSTER, policy="cpr", sizing=Sizing(3))
    found = summary(same, SLO)

    assert summary(fixed, SLO) == found
    assert found.replica_hours == pytest.approx(3 * same.lasted_s / 3600)
    assert (found.replicas_max, found.turns, found.started) == (3, 0, 0)
    assert found.replicas_mean == pytest.approx(3)


@pytest.mark.parametrize(
    ("wanted", "count"), [([], 0), ([3], 0), ([1, 2, 3], 0), ([1, 2, 2, 1], 1), ([3, 2, 4, 4, 1, 0, 5], 3)]
)
def test_turns_count_changes_of_scaling_direction(wanted: list[int], count: int) -> None:
    assert turns(wanted) == count
