"""How much concurrent requests slow each other down, learned from a replica at different loads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.admission import PaceModel
from forebay.core.admission.pace import APART_MIN, EVERY_S, FORGET_S, LEVELS, PaceLine

PLACES = 8


def test_replica_without_streams_has_no_estimate() -> None:
    assert PaceModel().line(5.0) is None


def test_slope_is_unknown_under_constant_load() -> None:
    pace = PaceModel()
    for n in range(9):
        pace.learn(7.5, PLACES, 0.08, float(n))
    assert pace.line(9.0) == PaceLine(pytest.approx(0.08), None)
    pace.learn(6.0, PLACES, 0.07, 10.0)
    assert pace.line(11.0) == PaceLine(pytest.approx(0.075), None), "too close"


@given(
    base_s=st.floats(0.001, 1),
    slope_s=st.floats(0, 0.1),
    running=st.lists(st.integers(1, PLACES), min_size=2, max_size=40),
)
def test_cost_per_concurrent_request_is_learned(base_s: float, slope_s: float, running: list[int]) -> None:
    pace = PaceModel()
    for n, each in enumerate(running):
        pace.learn(each, PLACES, base_s + slope_s * each, float(n))
    line = pace.line(float(len(running)))
    assert line is not None
    levels = [min(LEVELS - 1, each) for each in running]
    assert (line.slope_s is not None) is (max(levels) - min(levels) >= APART_MIN)
    if line.slope_s is not None:
        assert line.slope_s == pytest.approx(slope_s, rel=1e-6, abs=1e-9)
        assert line.base_s == pytest.approx(base_s, rel=1e-6)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(1e-6, 10)), min_size=1, max_size=40))
def test_estimates_are_never_negative(samples: list[tuple[float, float]]) -> None:
    pace = PaceModel()
    for n, (running, pace_s) in enumerate(samples):
        pace.learn(running, PLACES, pace_s, float(n))
    line = pace.line(40.0)
    assert line is not None
    assert line.base_s >= 0.0
    assert line.slope_s is None or line.slope_s >= 0.0


def test_old_samples_expire() -> None:
    pace = PaceModel()
    pace.learn(1, PLACES, 0.02, 0.0)
    pace.learn(8, PLACES, 0.09, 0.0)
    assert pace.line(FORGET_S / 2) == PaceLine(pytest.approx(0.01), pytest.approx(0.01))
    pace.learn(8, PLACES, 0.09, FORGET_S)
    assert pace.line(FORGET_S + 1) == PaceLine(pytest.approx(0.09), None)
    pace.learn(1, PLACES, 0.5, 2 * FORGET_S)
    assert pace.line(2 * FORGET_S + 1) == PaceLine(pytest.approx(0.5), None), "it begins anew"


def test_a_few_samples_a_second_are_enough() -> None:
    pace = PaceModel()
    assert pace.wants(0.0)
    pace.learn(1, PLACES, 0.02, 0.0)
    assert not pace.wants(EVERY_S / 2)
    assert pace.wants(EVERY_S)
