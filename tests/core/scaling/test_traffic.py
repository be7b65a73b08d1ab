"""Levels of the load, over short and long times."""

from dataclasses import replace

import pytest
from tests.core.scaling.looks import BUSY, QUIET, T0

from forebay.core.scaling.traffic import LONG_S, PEAK_S, Traffic, peak, with_reading
from forebay.core.scaling.values import Reading


def through(traffic: Traffic, reading: Reading, ticks: int) -> Traffic:
    for tick in range(ticks):
        traffic = with_reading(traffic, replace(reading, at=reading.at + 5 * tick))
    return traffic


def test_work_is_tokens_those_of_answers_four_times_and_one_for_each_request() -> None:
    flow = through(Traffic(), BUSY, 1)

    assert flow.level == flow.short == flow.long == (5000 + 10 * 401) / 5
    assert (flow.requests, flow.in_flight, flow.output) == (2.0, 4.0, 100.0)


def test_the_mean_length_of_answers_stands_when_none_end() -> None:
    flow = through(through(Traffic(), BUSY, 10), replace(BUSY, completions=0, output_tokens=0), 10)

    assert flow.output == 100.0


def test_shorter_means_follow_first_and_there_is_no_trend_before_there_is_a_past() -> None:
    flow = through(Traffic(), BUSY, 20)
    assert flow.slope() == 0.0

    flow = through(through(flow, BUSY, 120), replace(BUSY, arrivals=20, prompt_tokens=10_000), 6)

    assert flow.short > flow.level > flow.long
    assert flow.slope() > 0
    assert flow.seen_s == LONG_S


def test_the_highest_load_of_each_replica_stays_for_a_while() -> None:
    flow = through(Traffic(), replace(BUSY, ready=2), 12)
    high = peak(flow)

    later = through(flow, replace(QUIET, at=T0 + 60, ready=2), 12)
    much_later = through(later, replace(QUIET, at=T0 + 120, ready=2), int(PEAK_S / 5) + 12)

    assert high == pytest.approx(flow.level / 2)
    assert peak(later) == high
    assert peak(much_later) < high / 2
    assert peak(Traffic()) == 0.0
