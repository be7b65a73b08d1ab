"""Time series of a replay, from a known outcome."""

import pytest

from forebay.core.errors import OK
from forebay.sim.load.values import Arrival
from forebay.sim.replay.cluster import Promise
from forebay.sim.replay.outcome import Outcome, Size, Work
from forebay.sim.report.curves import BUCKETS_MAX, CDF_POINTS, SIZES_MAX, Curves, curves

SLO = Promise(ttft_s=1.0, tpot_s=0.1)


def outcome_of(ttfts_s: list[float], *, tpot_s: float = 0.05, every_s: float = 1.0) -> Outcome:
    """Requests one after another, with 11 tokens each; a time to the first token below 0 is a refusal."""
    outcome = Outcome(len(ttfts_s))
    for id, ttft_s in enumerate(ttfts_s):
        at = id * every_s
        outcome.arrived(id, at, Arrival(at, 100, 11))
        if ttft_s < 0:
            outcome.ended(id, at, "queue_timeout")
        else:
            outcome.first_at[id] = at + ttft_s
            outcome.served(id, 0, 0)
            outcome.ended(id, at + ttft_s + 10 * tpot_s, OK)
    outcome.lasted_s = 100.0
    outcome.replicas = [Work(1, 200, 0, 20.0, 0), Work(1, 800, 0, 80.0, 0)]
    return outcome


def test_distribution_counts_requests_without_a_token() -> None:
    found = curves(outcome_of([0.4, -1, 0.2, 0.3]), SLO)

    assert found.ttft == (
        (pytest.approx(0.2), 0.25),
        (pytest.approx(0.3), 0.5),
        (pytest.approx(0.4), 0.75),
    )


def test_thinned_fleet_sizes_keep_the_maximum_of_each_interval() -> None:
    outcome = outcome_of([0.1])
    assert curves(outcome, SLO).replicas == ()
    outcome.sizes = [Size(0.0, 2, 2, 2), Size(60.0, 3, 2, 3)]
    assert curves(outcome, SLO).replicas == ((0.0, 2.0), (60.0, 3.0), (100.0, 3.0))
    outcome.sizes = [Size(at / 50, 1, 1, 1 + at % 7) for at in range(5000)]
    points = curves(outcome, SLO).replicas
    assert len(points) == SIZES_MAX + 1
    assert {count for _, count in points[:-1]} == {7.0}


def test_thinned_fleet_sizes_count_from_their_change_to_the_next() -> None:
    outcome = outcome_of([0.4])
    many = [Size(at / 100, 1, 1, 1) for at in range(SIZES_MAX)]
    outcome.lasted_s, outcome.sizes = float(SIZES_MAX), [*many, Size(10.5, 9, 9, 9), Size(20.5, 2, 2, 2)]

    counts = [count for _, count in curves(outcome, SLO).replicas]

    assert counts == [1.0] * 10 + [9.0] * 11 + [2.0] * (SIZES_MAX - 21) + [2.0]


def test_replica_curves_are_sorted_by_work() -> None:
    assert curves(outcome_of([0.4]), SLO).computed == (800, 200)


@pytest.mark.parametrize(
    ("ttfts_s", "tpot_s", "good"),
    [
        ([0.5] * 40, 0.05, 40),
        ([1.5] * 40, 0.05, 0),
        ([0.5] * 40, 0.2, 0),
        ([0.5, -1] * 20, 0.05, 20),
    ],
)
def test_rate_curve_integrates_to_all_requests(ttfts_s: list[float], tpot_s: float, good: int) -> None:
    found = curves(outcome_of(ttfts_s, tpot_s=tpot_s), SLO)
    width_s = found.arrived[1][0] - found.arrived[0][0]

    assert sum(rate for _, rate in found.arrived) * width_s == pytest.approx(40)
    assert sum(rate for _, rate in found.good) * width_s == pytest.approx(good)


def test_curves_have_a_bounded_number_of_points() -> None:
    long: Curves = curves(outcome_of([0.5 + id / 1e4 for id in range(5000)]), SLO)
    nothing = curves(outcome_of([-1]), SLO)

    assert len(long.ttft) == CDF_POINTS
    assert len(long.good) == BUCKETS_MAX
    assert long.ttft[-1][1] == 1.0
    assert nothing.ttft == ()
    assert len(nothing.arrived) == 1
