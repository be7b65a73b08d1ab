"""Levels of the load, over short and long times."""

from dataclasses import replace

import pytest
from tests.core.scaling.autoscaled_model import BUSY, QUIET, T0

from forebay.core.scaling.traffic import LONG_S, PEAK_S, Traffic, peak, with_reading
from forebay.core.scaling.values import Reading


def through(traffic: Traffic, reading: Reading, ticks: int) -> Traffic:
    for tick in range(ticks):
        traffic = with_reading(traffic, replace(reading, at=reading.at + 5 * tick))
    return traffic


def test_work_is_prompt_tokens_plus_four_per_answer_token_plus_one_per_request() -> None:
    flow = through(Traffic(), BUSY, 1)

    assert flow.level == flow.short == flow.long == (5000 + 10 * 401) / 5
    assert (flow.requests, flow.in_flight, flow.output) == (2.0, 4.0, 100.0)


def test_mean_answer_length_is_kept_while_none_ends() -> None:
    flow = through(through(Traffic(), BUSY, 10), replace(BUSY, completions=0, output_tokens=0), 10)

    assert flow.output == 100.0


def test_short_window_follows_first_and_slope_needs_history() -> None:
    flow = through(Traffic(), BUSY, 20)
    assert flow.slope() == 0.0

    flow = through(through(flow, BUSY, 120), replace(BUSY, arrivals=20, prompt_tokens=10_000), 6)

    assert flow.short > flow.level > flow.long
    assert flow.slope() > 0
    assert flow.seen_s == LONG_S


def test_peak_load_per_replica_is_remembered_for_a_while() -> None:
    flow = through(Traffic(), replace(BUSY, ready=2), 12)
    high = peak(flow)

    later = through(flow, replace(QUIET, at=T0 + 60, ready=2), 12)
    much_later = through(later, replace(QUIET, at=T0 + 120, ready=2), int(PEAK_S / 5) + 12)

    assert high == pytest.approx(flow.level / 2)
    assert peak(later) == high
    assert peak(much_later) < high / 2
    assert peak(Traffic()) == 0.0
