"""Transformed workloads: same requests at other times, or fewer; and the columns kept of requests."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.sim.load.change import between, faster, first, jittered
from forebay.sim.load.columns import columns
from forebay.sim.load.describe import describe
from forebay.sim.load.values import Arrival, Workload

rows = st.builds(
    Arrival,
    at_s=st.integers(0, 100).map(float),
    prompt_tokens=st.integers(1, 5_000),
    output_tokens=st.integers(1, 500),
    blocks=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    tenant=st.sampled_from(["", "a", "b"]),
    band=st.sampled_from(["", "batch"]),
)
workloads = st.lists(rows, max_size=30).map(
    lambda found: Workload("w", tuple(sorted(found, key=lambda arrival: arrival.at_s)))
)


@given(st.lists(rows, max_size=30), st.slices(30))
def test_workload_columns_equal_their_requests(found: list[Arrival], part: slice) -> None:
    made = columns(found)

    assert list(made) == found == [made[place] for place in range(len(made))]
    assert list(made[part]) == found[part]
    assert list(made.in_order()) == sorted(found, key=lambda arrival: arrival.at_s)
    assert columns(made) is made


@given(workloads, st.floats(0.1, 10))
def test_speedup_divides_only_arrival_times(workload: Workload, speed: float) -> None:
    quick = faster(workload, speed)

    assert list(quick.arrivals) == [arrival._replace(at_s=arrival.at_s / speed) for arrival in workload.arrivals]


def test_speed_must_be_above_zero() -> None:
    for speed in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be above 0"):
            faster(Workload("w", ()), speed)


@given(workloads, st.integers(0, 100), st.integers(0, 100))
def test_workload_slice_starts_at_time_zero(workload: Workload, from_s: int, to_s: int) -> None:
    part = between(workload, from_s, to_s)

    assert list(part.arrivals) == [
        arrival._replace(at_s=arrival.at_s - from_s) for arrival in workload.arrivals if from_s <= arrival.at_s < to_s
    ]


@given(workloads, st.integers(0, 40))
def test_first_keeps_the_first_requests(workload: Workload, count: int) -> None:
    assert list(first(workload, count).arrivals) == list(workload.arrivals[:count])


@given(workloads, st.integers(0, 5), st.floats(0.5, 5))
def test_jitter_moves_requests_by_less_than_the_clock_tick_in_order(
    workload: Workload, seed: int, quantum_s: float
) -> None:
    moved = jittered(workload, quantum_s, Random(seed)).arrivals
    times = [arrival.at_s for arrival in moved]

    assert times == sorted(times)
    assert [arrival[1:] for arrival in moved] == [arrival[1:] for arrival in workload.arrivals]
    for after, before in zip(times, workload.arrivals, strict=True):
        assert before.at_s <= after <= before.at_s + quantum_s


def test_workload_figures_equal_hand_counted_ones() -> None:
    arrivals = (
        Arrival(1.0, 1_000, 10, (1, 2), "a"),
        Arrival(1.0, 1_500, 20, (1, 2, 3), "b"),  # finds 1,024 of its tokens
        Arrival(4.0, 600, 30, (9, 2), "a"),  # another beginning: 2 is not the same here
        Arrival(10.0, 900, 40, (1, 2), "a"),  # finds all of them
    )

    figures = describe(Workload("w", arrivals))

    assert figures[:3] == (4, 10.0, 0.4)
    assert figures.gap_cv == pytest.approx(6**0.5 / 3)
    assert figures.prompt_tokens == pytest.approx((950, 1425, 1000))
    assert figures.output_tokens == pytest.approx((25, 38.5, 25))
    assert figures[-2:] == (1924 / 4000, 2)


def test_workload_figures_handle_tiny_workloads() -> None:
    one = describe(Workload("w", (Arrival(0.0, 7, 3),)))

    assert one == (1, 0.0, 0.0, 0.0, (7, 7, 7), (3, 3, 3), None, 0)
    with pytest.raises(ValueError, match="w: there are no requests"):
        describe(Workload("w", ()))
