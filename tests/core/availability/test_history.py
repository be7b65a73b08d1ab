"""Sums of observed and unobserved time, and the remaining error budget of an objective."""

from itertools import pairwise
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.availability.budget import Requests, budget, objective_result
from forebay.core.availability.history import (
    GAP_S_MIN,
    HOUR_S,
    AvailabilitySums,
    Gap,
    ServingObservation,
    gaps,
    sums_of,
)
from forebay.core.availability.measured import LifetimeSums

DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("sight", "up", "full"),
    [
        (ServingObservation(2, 2, 3, True), True, True),
        (ServingObservation(2, 1, 1, True), True, False),
        (ServingObservation(2, 0, 0, True), False, False),
        (ServingObservation(0, 0, 0, True), True, True),
        (ServingObservation(2, 2, 2, False), False, False),
        (ServingObservation(0, 0, 1, False), False, False),
    ],
)
def test_model_is_up_while_a_gateway_has_a_replica_or_none_is_wanted(
    sight: ServingObservation, up: bool, full: bool
) -> None:
    seen = sums_of(sight, 10.0)
    assert seen == AvailabilitySums(10.0, 10.0 * up, 10.0 * full, LifetimeSums(10.0 * sight.ready))
    assert (seen + seen).down_s == 20.0 * (not up)


@given(st.dictionaries(st.integers(0, 9), st.floats(0, HOUR_S)), st.floats(0, 9 * HOUR_S), st.floats(0, 9 * HOUR_S))
def test_unknown_time_is_reported_in_disjoint_gaps(known: dict[int, float], one: float, other: float) -> None:
    since, until = sorted((one, other))
    found = list(gaps(known, since, until))
    for gap in found:
        assert since <= gap.since <= gap.until <= until
        assert gap.unknown_s >= GAP_S_MIN
    assert all(a.until < b.since for a, b in pairwise(found))


def test_adjacent_unobserved_hours_are_one_gap() -> None:
    hour = float(HOUR_S)
    assert list(gaps({}, 0.0, 5 * hour)) == [Gap(0.0, 5 * hour, 5 * hour)]
    assert list(gaps({0: hour, 1: hour - 40, 2: hour, 3: hour - 5}, 0.0, 4 * hour)) == [Gap(hour, 2 * hour, 40.0)]
    assert list(gaps({0: hour}, 0.0, hour)) == []


@pytest.mark.parametrize("seconds", [0.0, 1.0, GAP_S_MIN - 1, GAP_S_MIN])
def test_partly_observed_hour_extends_the_adjacent_gap(seconds: float) -> None:
    hour = float(HOUR_S)
    assert list(gaps({}, hour - seconds, 2 * hour)) == [Gap(hour - seconds, 2 * hour, hour + seconds)]
    assert list(gaps({}, 0.0, hour + seconds)) == [Gap(0.0, hour + seconds, hour + seconds)]
    assert list(gaps({0: hour}, 0.0, hour + 5.0)) == []


def test_error_budget_of_three_nines_over_thirty_days() -> None:
    requests = Requests(0.0, 1.0, ok=9_995, failed=5, refused=70, cancelled=30)
    left = budget(0.999, 30 * DAY_S, AvailabilitySums(known_s=10 * DAY_S, up_s=10 * DAY_S - 600), requests)

    assert isclose(left.allowed_s / 60, 43.2)
    assert isclose(left.left_s / 60, 33.2)
    assert left.unknown_s == 20 * DAY_S
    assert isclose(left.allowed_requests, 10.0)
    assert isclose(left.left_requests, 5.0)
    assert left.burn is not None
    assert isclose(left.burn, 0.5)


def test_budget_without_requests_has_no_burn_rate() -> None:
    nothing = budget(0.99, 60.0, AvailabilitySums(70.0, 70.0), Requests(0.0, 1.0, refused=3))
    assert (nothing.burn, nothing.allowed_requests, nothing.unknown_s) == (None, 0.0, 0.0)


def test_latency_objective_is_met_up_to_its_limit() -> None:
    assert objective_result("ttft", 0.5, 7.0, []) is None
    found = objective_result("ttft", 0.5, 7.0, [i / 100 for i in range(200, 0, -1)])
    assert found
    assert (found.since, found.requests, found.kept, found.p99_s) == (7.0, 200, 50, 1.98)
    one = objective_result("latency", 0.5, 7.0, [0.7])
    assert one
    assert (one.kept, one.p99_s) == (0, 0.7)
