"""Load forecasts by trend, time of day, or time of week, whichever was most accurate so far."""

import math
from collections.abc import Callable

import pytest

from forebay.core.scaling.season import (
    OPEN_MAX,
    RATIO_MAX,
    WEEK_BINS,
    Season,
    Way,
    best,
    forecast,
    with_level,
)

DAY_S = 86_400.0
T0 = 1_715_385_600.0


def by_day(at: float) -> float:
    return 100 * (1.2 + math.sin(2 * math.pi * at / DAY_S))


def by_week(at: float) -> float:
    return by_day(at) * (0.2 if int(at // DAY_S) % 7 in (2, 3) else 1.0)


def after_days(
    load: Callable[[float], float], days: float, horizon_s: float = 1800.0, every_s: float = 300.0
) -> Season:
    season = Season()
    for tick in range(int(days * DAY_S / every_s)):
        at = T0 + tick * every_s
        season = with_level(season, load(at), 0.0, horizon_s, at)
    return season


def test_forecast_without_history_is_the_trend() -> None:
    assert best(Season()) == 0
    assert forecast(Season(), 100.0, 0.1, 60.0, T0) == 106.0


@pytest.mark.parametrize(("slope", "found"), [(1e6, 100 * RATIO_MAX), (-1e6, 100 / RATIO_MAX)])
def test_trend_forecast_is_bounded(slope: float, found: float) -> None:
    assert forecast(Season(), 100.0, slope, 60.0, T0) == found


def test_forecast_follows_the_time_of_day_after_a_day() -> None:
    season = after_days(by_day, 2.0)
    now = T0 + 2 * DAY_S

    assert best(season) == 1
    for hours in (0, 3, 9, 15, 21):
        at = now + 3600 * hours
        assert forecast(season, by_day(at), 0.0, 1800.0, at) == pytest.approx(by_day(at + 1800), rel=0.06)


def test_forecast_follows_the_time_of_week_after_a_week_if_days_differ() -> None:
    season = after_days(by_week, 15.0)

    assert best(season) == 2
    eve = next(at for at in (T0 + (15 + day) * DAY_S for day in range(7)) if by_week(at) < by_week(at - 60) / 2)
    assert forecast(season, by_week(eve - 900), 0.0, 1800.0, eve - 900) < by_week(eve - 900) / 2


def test_load_without_seasonality_is_forecast_by_trend() -> None:
    def wandering(at: float) -> float:
        return 100 * (1.3 + math.sin(at / 5000) * math.cos(at / 37_000))

    season = after_days(wandering, 3.0, horizon_s=300.0)

    assert best(season) == 0
    assert all(way.error > 0 for way in season.ways)


def test_forecast_of_hours_without_load_is_the_trend() -> None:
    season = after_days(lambda at: 100.0 if at % DAY_S < 7200 else 0.0, 3.0)

    assert forecast(season, 50.0, 0.0, 3600.0, T0 + 3 * DAY_S + 20_000) == 50.0
    assert len(season.forecasts) <= OPEN_MAX


def test_weekly_profile_weights_the_latest_week_most() -> None:
    flat = after_days(lambda _: 100.0, 7.1)
    twice = flat
    for tick in range(int(7 * DAY_S / 600)):
        at = T0 + 7.1 * DAY_S + tick * 600
        twice = with_level(twice, 200.0, 0.0, 600.0, at)

    assert len(twice.week) == WEEK_BINS
    assert min(twice.week) == pytest.approx(140, abs=1) or max(twice.week) == pytest.approx(140, abs=1)


def test_forecasting_method_is_used_only_after_enough_trials() -> None:
    ways = (Way(0.3, 30), Way(0.1, 29), Way(0.2, 30))

    assert best(Season(ways=ways)) == 2
