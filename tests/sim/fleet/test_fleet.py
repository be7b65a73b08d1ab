"""Fleets under short loads: nothing is lost, results are deterministic, and they agree with replays."""

from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.scaling.settings import Policy, Scale
from forebay.core.scaling.values import Reading
from forebay.sim.engine import hardware
from forebay.sim.fleet import loads
from forebay.sim.fleet.fleet import QUEUE_S, Fleet
from forebay.sim.fleet.response import GRADES, STEPS, Answer, Measured, Response, measured, response
from forebay.sim.fleet.sizers import ATTAINMENT, Planned, Scaler, ahead, needed, part, peak
from forebay.sim.fleet.values import FleetFaults, Load
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.outcome import Slo, summary
from forebay.sim.replay.run import replay

KEPT = Answer((1.0,) * (STEPS + 1), 2.0, 0.1, 0.5, 0.2, 0.02)
FULL = Answer((0.9,) * (STEPS + 1), 8.0, 0.4, 1.0, 1.0, 0.2)
PLAIN = Response(5.0, 0.01, 0.0, 2.0, 8, ((*[KEPT] * 81, *[FULL] * (GRADES - 80)),))
"""Two requests a second of 100 prompt tokens; all is well up to four fifths of it."""
LATE = PLAIN._replace(answers=((KEPT._replace(good=(0.99,) * (STEPS + 1)),) * (GRADES + 1),))
"""One answer in a hundred is late at any load."""


def load(*rates_per_s: float, ticks: int = 12, tick_s: float = 5.0) -> Load:
    """So many requests of 100 prompt tokens a second, each rate for so many ticks."""
    arrivals = [rate * tick_s for rate in rates_per_s for _ in range(ticks)]
    return Load("test", tick_s, arrivals, [100 * each for each in arrivals], [0.0] * len(arrivals))


class Seen:
    """Keeps what it is shown, and wants a number of replicas."""

    def __init__(self, replicas: int) -> None:
        self.readings: list[Reading | None] = []
        self.replicas = replicas

    def size(self, reading: Reading | None, now: float, current: int) -> int:
        self.readings.append(reading)
        return self.replicas


def test_fleet_with_spare_capacity_meets_the_objective() -> None:
    result = Fleet(load(2.0), PLAIN, None, start_s=100.0, begin=2).run()
    assert result.attainment == 1.0
    assert (result.arrivals, result.good, result.open) == (120.0, 120.0, 0.0)
    assert result.replica_hours == pytest.approx(2 * 60 / 3600)
    assert (result.ready, result.started) == ([2] * 12, 0)


def test_requests_queue_for_too_few_replicas_and_time_out() -> None:
    result = Fleet(load(8.0, ticks=60), PLAIN, None, start_s=100.0).run()
    assert result.refused > 0
    assert result.attainment < 0.1
    assert result.good + result.late == pytest.approx(2.0 * 300)  # what one replica does in all the time
    assert result.open <= 8.0 * (QUEUE_S + 5.0)


def test_replicas_serve_once_started_and_cost_from_their_order() -> None:
    result = Fleet(load(2.0, ticks=60), PLAIN, Seen(3), start_s=100.0, begin=1).run()
    assert result.ready[0] == 1
    assert result.ready[-1] == 3
    first = result.ready.index(2)
    assert 70.0 < first * 5.0 < 150.0
    assert result.replica_s == pytest.approx(3 * 300 - 2 * 5.0)
    assert result.started == 2


def test_requests_wait_for_the_first_replica_of_an_empty_fleet() -> None:
    result = Fleet(load(0.5), PLAIN, None, start_s=100.0, begin=0).run()
    assert result.good == result.late == 0.0
    assert result.open + result.refused == pytest.approx(result.arrivals)


def test_crashed_replica_is_restarted() -> None:
    calm = Fleet(load(2.0, ticks=60), PLAIN, None, start_s=100.0, begin=2).run()
    result = Fleet(
        load(2.0, ticks=60), PLAIN, None, start_s=100.0, begin=2, faults=FleetFaults(failures_s=(50.0,))
    ).run()
    assert min(result.ready) == 1
    assert result.ready[-1] == 2
    assert result.started == 1
    assert result.good < calm.good


def test_fractional_late_answers_per_tick_add_up() -> None:
    seen = Seen(1)
    result = Fleet(load(0.4, ticks=200), LATE, seen, start_s=100.0).run()
    told = sum(each.late or 0 for each in seen.readings if each)
    assert result.late == pytest.approx(4.0)
    assert told == pytest.approx(result.late, abs=1.0)


def test_policy_sees_the_fleet_except_during_an_outage() -> None:
    seen = Seen(3)
    Fleet(load(8.0, ticks=24), PLAIN, seen, start_s=100.0, begin=2, faults=FleetFaults(outages=((10.0, 20.0),))).run()
    assert [at for at, each in enumerate(seen.readings) if each is None] == [2, 3]
    first, last = seen.readings[0], seen.readings[-1]
    assert first is not None
    assert last is not None
    assert (first.ready, first.pending, first.arrivals, first.prompt_tokens) == (2, 0, 40, 4000)
    assert (first.completions, first.late, first.since_s, first.duty) == (20, 2, 5.0, 1.0)
    assert last.ready == 3
    assert last.waiting > 0
    assert last.in_flight > last.waiting
    assert last.backlog_tokens > 0
    assert last.cold_start_s is not None
    assert 90.0 < last.cold_start_s < 160.0


def test_scale_in_is_immediate_and_removes_starting_replicas_first() -> None:
    result = Fleet(load(1.0), PLAIN, Planned([2, 4, 3, 1, 1, 3]), start_s=1000.0, begin=2).run()
    assert result.ready == [2, 2, 2, *[1] * 9]
    assert result.wanted == [4, 3, 1, 1, *[3] * 8]
    assert len(result.turns) == 2


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0.0, 20.0), min_size=1, max_size=8),
    st.lists(st.integers(0, 6), min_size=1, max_size=20),
    st.lists(st.floats(0.0, 400.0), max_size=3),
)
def test_every_request_ends_once(rates: list[float], plan: list[int], failures: list[float]) -> None:
    faults = FleetFaults(failures_s=tuple(sorted(failures)))
    fleet = Fleet(load(*rates), PLAIN, Planned(plan), start_s=30.0, begin=plan[0], seed=3, faults=faults)
    result = fleet.run()
    ended = result.good + result.late + result.refused + result.open
    assert ended == pytest.approx(result.arrivals, abs=1e-6)
    assert min(result.ready) >= 0
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in result.shares)


@pytest.mark.parametrize("policy", list(Policy))
def test_fleet_run_is_deterministic_and_every_policy_follows_rising_load(policy: Policy) -> None:
    stories = []
    for _ in range(2):
        scaler = Scaler(Scale(12, policy=policy, target=2.0, ttft_s=5.0, tpot_s=0.05))
        climb = load(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, ticks=36)
        stories.append(Fleet(climb, PLAIN, scaler, start_s=60.0, begin=1, seed=5).run())
    assert astuple(stories[0]) == astuple(stories[1])
    assert stories[0].ready[-1] >= 4


def test_peak_is_the_smallest_fleet_that_meets_the_objective() -> None:
    climb = load(1.0, 4.0, 7.0)
    found = peak(climb, PLAIN)
    assert [
        Fleet(climb, PLAIN, None, start_s=0.0, begin=count).run().attainment >= ATTAINMENT
        for count in (found - 1, found)
    ] == [False, True]
    assert peak(climb, PLAIN, guess=40) == found


def test_oracle_orders_the_replicas_of_each_period_ahead() -> None:
    steps = load(1.0, 6.0, 1.0)
    need = needed(steps, PLAIN, period_s=60.0)
    assert need == [1] * 12 + [4] * 12 + [1] * 12
    plan = ahead(need, 10.0, 5.0)
    assert plan == [1] * 10 + [4] * 14 + [1] * 12
    result = Fleet(steps, PLAIN, Planned(plan), start_s=8.0, begin=1).run()
    assert result.attainment > ATTAINMENT
    assert result.replica_s == pytest.approx(5.0 * sum(plan))


def test_generated_load_has_the_given_rates_and_lengths() -> None:
    mix = ((100, 10), (300, 30))
    jump = loads.step(2.0, 5.0, mix, 1, at_s=600.0, until_s=1200.0)
    assert len(jump.arrivals) == 240
    assert 3.5 < sum(jump.arrivals[120:]) / sum(jump.arrivals[:120]) < 6.5
    assert sum(jump.prompt_tokens) == 10 * sum(jump.output_tokens)
    flat = loads.constant(4.0, 0.5, mix, 1)
    assert sum(flat.arrivals) / 1800.0 == pytest.approx(4.0, rel=0.1)
    single = loads.requests(flat, mix, 1)
    again = loads.ticks(single)
    assert list(again.arrivals) == flat.arrivals[: len(again.arrivals)]
    assert sum(again.prompt_tokens) == 10 * sum(again.output_tokens)


@pytest.mark.slow
def test_day_load_has_the_scale_of_its_source() -> None:
    found = loads.day(1)
    assert len(found.arrivals) == 17_280
    assert sum(found.arrivals) / 86_400 == pytest.approx(196, rel=0.01)
    assert loads.day(1) == found
    assert sum(found.prompt_tokens) / sum(found.arrivals) == pytest.approx(710, rel=0.02)
    assert len(loads.day_mix()) == loads.MIX


@pytest.mark.slow
def test_week_load_has_the_requested_rate() -> None:
    found = loads.week(1, 2.0)
    assert len(found.arrivals) == 7 * 8_640
    assert sum(found.arrivals) / (7 * 86_400) == pytest.approx(2.0, rel=0.01)
    mean = sum(prompt for prompt, _ in loads.week_mix()) / loads.MIX
    assert sum(found.prompt_tokens) / sum(found.arrivals) == pytest.approx(mean, rel=0.05)


def test_response_interpolates_linearly_and_idle_replicas_have_nothing_in_flight() -> None:
    points = [[[1.0 - load / 20] * (STEPS + 1) + [load * 10.0, 0.1, load, 0.2, 0.02] for load in _loads()]] * 4
    found = response(SimCluster(), [(1000, 100)], Measured(3.0, points))
    assert found.answer(3, 0.0).in_flight == 0.0
    assert found.answer(16, 0.55).in_flight == pytest.approx(5.5)
    assert found.answer(100, 1.7).good[-1] == pytest.approx(0.95)
    assert found.prompt_token * 1000 + found.output_token * 100 == pytest.approx(1.0)
    assert found.room == 256


def _loads() -> list[float]:
    return [step / 10 for step in range(1, 11)]


@pytest.mark.slow
def test_a_fleet_agrees_with_a_replay_of_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZES": (1, 2), "SPAN_S": 30.0, "REQUESTS_MIN": 300, "LOADS": (0.2, 0.5, 0.8, 1.0)}.items():
        monkeypatch.setattr(f"forebay.sim.fleet.response.{name}", value)
    cluster = SimCluster(replicas=2)
    mix = ((2000, 20), (500, 10), (4000, 60))
    found = response(cluster, mix, measured(cluster, mix))
    row = hardware(cluster.gpu, cluster.model, cluster.tensor_parallel, cluster.precision)
    assert found.prompt_token / found.output_token == pytest.approx(
        row.step.step_s(2048, 2048 * 1024, 0, 0) / 2048 / (row.step.step_s(64, 0, 64 * 2181, 64) / 64), rel=0.01
    )
    for rate in (2.0, 6.0):
        workload = loads.requests(loads.constant(rate, 1 / 12, mix, 1), mix, 1)
        replayed = summary(replay(workload, cluster, policy="cpr", seed=1), Slo(5.0, 0.1)).goodput
        fleet = Fleet(loads.ticks(workload), found, None, start_s=0.0, begin=2).run()
        assert fleet.attainment == pytest.approx(replayed, abs=0.03), rate


def test_part_of_a_load_keeps_its_arrivals() -> None:
    assert part(load(1.0, 2.0), 11, 13).arrivals == [5.0, 10.0]
