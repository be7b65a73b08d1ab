"""Differences and sums of gateway counters."""

from dataclasses import asdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.pressure import Pressure, TrafficCounters, above, difference, quantile, sum_over_gateways

COUNT = st.integers(0, 1000)
GROWING = st.builds(
    TrafficCounters,
    COUNT,
    COUNT,
    COUNT,
    COUNT,
    COUNT,
    st.floats(0, 1e6).map(lambda x: float(round(x))),
    st.tuples(COUNT, COUNT),
    st.tuples(COUNT, COUNT),
)


@settings(max_examples=30)
@given(GROWING, GROWING)
def test_difference_of_two_readings_is_the_traffic_between_them(
    before: TrafficCounters, more: TrafficCounters
) -> None:
    assert difference(before, sum_over_gateways([before, more])) == more
    assert difference(TrafficCounters(), more) == more


def test_difference_is_never_negative_and_keeps_current_queue_lengths() -> None:
    shrunk = difference(
        TrafficCounters(5, 5, 5, 5, 5, 5.0, (3,), (3,), 9, 9, 9), TrafficCounters(waiting=2, waiting_tokens=20)
    )
    assert shrunk == TrafficCounters(ttft=(0,), tpot=(0,), waiting=2, waiting_tokens=20)


def test_gateway_queues_add_up_and_replica_queue_estimates_take_the_maximum() -> None:
    parts = [TrafficCounters(waiting=1, queued_tokens=100), TrafficCounters(waiting=2, queued_tokens=90)]
    assert sum_over_gateways(parts) == TrafficCounters(waiting=3, queued_tokens=100)
    assert sum_over_gateways([]) == TrafficCounters()


def test_predicted_latencies_are_averaged_weighted_by_arrivals() -> None:
    busy, calm = (
        TrafficCounters(arrivals=8, predicted_ttft_s=1.0, predicted_tpot_s=0.02),
        TrafficCounters(predicted_ttft_s=0.0),
    )
    older = TrafficCounters(arrivals=90)  # it says nothing of what it predicts

    found = sum_over_gateways([busy, older, calm])
    assert (found.predicted_ttft_s, found.predicted_tpot_s) == (0.9, 0.02)
    assert sum_over_gateways([older, older]).predicted_ttft_s is None
    grown = difference(TrafficCounters(3, predicted_ttft_s=9.0), busy)
    assert (grown.arrivals, grown.predicted_ttft_s, grown.predicted_tpot_s) == (5, 1.0, 0.02)


def test_pressure_document_is_compatible_between_versions() -> None:
    known = {name: value for name, value in asdict(TrafficCounters(arrivals=7)).items() if "predicted" not in name}
    older, newer = ({**known, **more} for more in ({}, {"predicted_ttft_s": 0.5, "predicted_more": 1}))
    told = msgspec.json.encode({"instance": "a", "age_s": 1.0, "models": {"old": older, "new": newer}})

    models = msgspec.json.decode(told, type=Pressure).models
    assert models == {"old": TrafficCounters(arrivals=7), "new": TrafficCounters(arrivals=7, predicted_ttft_s=0.5)}


@pytest.mark.parametrize(
    ("counts", "share", "found"),
    [
        ((0, 0, 0), 0.9, None),
        ((10, 0, 0), 0.5, 0.5),
        ((10, 10, 0), 0.75, 1.5),
        ((0, 0, 5), 0.9, 2.0),
        ((1, 0, 1), 0.5, 1.0),
    ],
)
def test_quantile_is_interpolated_linearly_within_its_bucket(
    counts: tuple[int, ...], share: float, found: float | None
) -> None:
    assert quantile((1.0, 2.0), counts, share) == found


@pytest.mark.parametrize(("limit", "found"), [(0.0, 30), (0.5, 25), (1.0, 20), (1.5, 15), (2.0, 10), (5.0, 10)])
def test_number_of_samples_above_a_limit(limit: float, found: int) -> None:
    assert above((1.0, 2.0), (10, 10, 10), limit) == found
