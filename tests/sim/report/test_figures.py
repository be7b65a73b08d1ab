"""Figures over seeds: means, intervals, differences, and how they are written."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.report.made import summary_of

from forebay.sim.replay.cluster import SimCluster
from forebay.sim.report.figures import (
    FIGURES,
    Estimate,
    Result,
    Unit,
    estimate,
    rows,
    shown,
    shown_difference,
    t_95,
)


def test_confidence_interval_is_that_of_students_t() -> None:
    """Values and interval as in any textbook: 4, 6 and 8 have the mean 6 and s = 2."""
    found = estimate([4.0, 6.0, 8.0])

    assert found.mean == 6.0
    assert found.half_width == pytest.approx(4.303 * 2 / math.sqrt(3))
    assert estimate([5.0]) == Estimate(5.0, None)


def test_students_t_quantile_decreases_smoothly_to_the_normal_one() -> None:
    values = [t_95(freedom) for freedom in range(1, 200)]

    assert values == sorted(values, reverse=True)
    assert t_95(31) == pytest.approx(2.0395, abs=0.001)
    assert t_95(100_000) == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-4)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40), st.floats(-1e3, 1e3))
def test_adding_a_constant_shifts_only_the_mean(values: list[float], more: float) -> None:
    before, after = estimate(values), estimate([value + more for value in values])

    assert after.mean == pytest.approx(before.mean + more, abs=1e-6)
    assert after.half_width == pytest.approx(before.half_width, abs=1e-4)


def test_differences_are_paired_by_seed() -> None:
    """Between seeds goodput moves by far more than between policies, yet what is different is plain."""
    results = []
    for seed, level in enumerate((0.2, 0.5, 0.9)):
        results.append(Result("cpr", 1.0, seed, summary_of(level)))
        results.append(Result("p2c", 1.0, seed, summary_of(level - 0.05, ttft_s=1.0 + seed)))
    first, second = rows(results, SimCluster())

    assert (first.policy, second.policy) == ("cpr", "p2c")
    assert first.against == {}
    assert second.against["goodput"].mean == pytest.approx(-0.05)
    assert second.against["goodput"].is_clear
    assert not second.against["cache_hit"].is_clear
    assert second.figures["goodput"].half_width > 0.5  # type: ignore[operator]
    assert second.against["ttft_mean_s"].mean == pytest.approx(1.0)


def test_policies_are_compared_within_each_scale() -> None:
    results = [
        Result(policy, scale, 0, summary_of(goodput * scale))
        for scale in (0.5, 1.0)
        for policy, goodput in (("cpr", 0.8), ("random", 0.4))
    ]
    found = rows(results, SimCluster())

    assert [(row.scale, row.policy) for row in found] == [
        (0.5, "cpr"),
        (0.5, "random"),
        (1.0, "cpr"),
        (1.0, "random"),
    ]
    assert found[1].against["goodput"] == Estimate(pytest.approx(-0.2), None)
    assert found[3].against["goodput"].mean == pytest.approx(-0.4)


def test_refusals_are_counted_by_reason_over_all_seeds() -> None:
    results = [
        Result("cpr", 1.0, 0, summary_of(0.9, refused={"queue_timeout": 4, "cut_off": 1})),
        Result("cpr", 1.0, 1, summary_of(0.9)),
    ]
    (row,) = rows(results, SimCluster())

    assert row.refused == {"cut_off": 0.5, "queue_timeout": 2.0}
    assert row.figures["refused"].mean == 2.5


def test_gpu_hours_count_every_gpu_and_cost_only_where_there_is_a_price() -> None:
    results = [Result("cpr", 1.0, 0, summary_of(0.9))]
    (free,) = rows(results, SimCluster(tensor_parallel=4))
    (priced,) = rows(results, SimCluster(tensor_parallel=4, gpu_hour_price=2.5))

    assert free.figures["gpu_hours"].mean == 8.0
    assert "cost" not in free.figures
    assert priced.figures["cost"].mean == 20.0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.9312, Unit.SHARE, "93.1%"),
        (math.nan, Unit.SECONDS, "-"),
        (0.0, Unit.SECONDS, "0 ms"),
        (0.00412, Unit.SECONDS, "4.12 ms"),
        (0.3184, Unit.SECONDS, "318 ms"),
        (0.9996, Unit.SECONDS, "1 s"),
        (1.237, Unit.SECONDS, "1.24 s"),
        (12.36, Unit.SECONDS, "12.4 s"),
        (1234.5, Unit.SECONDS, "1,234 s"),
        (-0.5, Unit.SECONDS, "-500 ms"),
        (1.0349, Unit.RATIO, "1.03"),
        (7.0, Unit.COUNT, "7"),
        (7.25, Unit.COUNT, "7.25"),
        (12031.0, Unit.COUNT, "12,031"),
        (1234.56, Unit.MONEY, "1,235"),
    ],
)
def test_figures_are_formatted_with_significant_digits_and_units(value: float, unit: Unit, text: str) -> None:
    assert shown(value, unit) == text


def test_differences_are_formatted_with_sign_and_percentage_points() -> None:
    assert shown_difference(0.25, Unit.SECONDS) == "+250 ms"
    assert shown_difference(-0.25, Unit.SECONDS) == "-250 ms"
    assert shown_difference(-0.012, Unit.SHARE) == "-1.2 pp"
    assert shown_difference(0.0, Unit.SHARE) == "0.0 pp"


def test_names_of_figures_end_with_their_units() -> None:
    for name, figure in FIGURES.items():
        assert name.endswith("_s") == (figure.unit is Unit.SECONDS or name == "goodput_per_s"), name
