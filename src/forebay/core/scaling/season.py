"""Load forecasts: by trend, by time of day, or by time of week.

The method with the lowest past error is used: forecasts are kept until they are due. The weekly profile is learned in
bins of ten minutes, and only its shape is used: the level is the current one.
"""

import math
from typing import Final, NamedTuple

BIN_S: Final = 600.0
DAY_BINS: Final = 144
WEEK_BINS: Final = 7 * DAY_BINS
NEW: Final = 0.4
"""Weight of a new week relative to all before."""
RATIO_MAX: Final = 4.0
"""Forecasts grow by at most this factor, and fall at most to its inverse."""
OPEN_MAX: Final = 24
"""Most forecasts that are kept until they are due."""
FORECAST_EVERY_S: Final = 60.0
ERROR_NEW: Final = 0.002
"""Weight of one forecast's error relative to all before: errors average over some hours."""
ERROR_USUAL: Final = 0.1
TRIED_MIN: Final = 30
"""A seasonal method is used once this many of its forecasts were due."""


class Way(NamedTuple):
    """The accuracy of one forecasting method."""

    error: float = ERROR_USUAL
    """Mean absolute error of the logarithm."""
    tried: int = 0


class Forecast(NamedTuple):
    """The forecasts of the three methods; 0: none."""

    due: float
    trend: float
    day: float
    week: float


class Season(NamedTuple):
    """Seasonal state of one model. Loads are work per second; 0: unknown."""

    week: tuple[float, ...] = ()
    """Weekly profile from Thursday, 0:00 UTC, as the epoch began; empty: unknown."""
    bin: int = -1
    """The bin of the week being filled."""
    mean: float = 0.0
    """Mean level in it so far."""
    looks: int = 0
    ways: tuple[Way, Way, Way] = (Way(), Way(), Way())
    """By trend, time of day, time of week."""
    forecasts: tuple[Forecast, ...] = ()
    """Not due yet, oldest first."""


def with_level(season: Season, level: float, slope: float, horizon_s: float, now: float) -> Season:
    """The state updated with the current level, which changes by `slope` per second. Forecasts are evaluated at
    `horizon_s`."""
    number = int(now // BIN_S) % WEEK_BINS
    if number == season.bin:
        looks = season.looks + 1
        season = season._replace(mean=season.mean + (level - season.mean) / looks, looks=looks)
    else:
        season = _closed(season)._replace(bin=number, mean=level, looks=1)
    if season.forecasts and season.forecasts[0].due <= now:
        season = _judged(season, level)
    last_due = season.forecasts[-1].due if season.forecasts else 0.0
    if level > 0 and now + horizon_s >= last_due + max(FORECAST_EVERY_S, horizon_s / OPEN_MAX):
        said = (_trend(level, slope, horizon_s), *(_by(season, days, level, horizon_s, now) for days in (7, 1)))
        season = season._replace(forecasts=(*season.forecasts, Forecast(now + horizon_s, *said))[-OPEN_MAX:])
    return season


def forecast(season: Season, level: float, slope: float, ahead_s: float, now: float) -> float:
    """The expected level in `ahead_s` seconds, by the best method."""
    way = best(season)
    found = 0.0 if way == 0 else _by(season, 7 if way == 1 else 1, level, ahead_s, now)
    return found or _trend(level, slope, ahead_s)


def best(season: Season) -> int:
    """The method in use: 0 trend, 1 time of day, 2 time of week."""
    ways = season.ways
    fit = [way for way in range(3) if way == 0 or ways[way].tried >= TRIED_MIN]
    return min(fit, key=lambda way: (ways[way].error, way))


def _trend(level: float, slope: float, ahead_s: float) -> float:
    return min(max(level + slope * ahead_s, level / RATIO_MAX), level * RATIO_MAX)


def _by(season: Season, days: int, level: float, ahead_s: float, now: float) -> float:
    """The level by the shape of the week (`days` 1), or averaged over its known days (7); 0: unknown."""
    here, there = _shape(season, days, now), _shape(season, days, now + ahead_s)
    if here <= 0 or there <= 0:
        return 0.0
    return level * min(max(there / here, 1 / RATIO_MAX), RATIO_MAX)


def _shape(season: Season, days: int, at: float) -> float:
    """The profile at a time, interpolated between the centres of its bins; 0: unknown."""
    if not season.week:
        return 0.0
    place = at / BIN_S - 0.5
    low = math.floor(place)
    left, right = _profile(season, days, low), _profile(season, days, low + 1)
    return left + (right - left) * (place - low) if left > 0 and right > 0 else 0.0


def _profile(season: Season, days: int, number: int) -> float:
    known = [value for day in range(days) if (value := season.week[(number + day * DAY_BINS) % WEEK_BINS]) > 0]
    return sum(known) / len(known) if known else 0.0


def _closed(season: Season) -> Season:
    """Add the finished bin to the profile."""
    if season.bin < 0 or season.mean <= 0:
        return season
    week = list(season.week or (0.0,) * WEEK_BINS)
    before = week[season.bin]
    value = before + (season.mean - before) * NEW if before > 0 else season.mean
    week[season.bin] = float(f"{value:.4g}")
    return season._replace(week=tuple(week))


def _judged(season: Season, level: float) -> Season:
    """Evaluate the oldest forecast, which is due."""
    said = season.forecasts[0][1:]
    ways = [
        _tried(way, abs(math.log(level / value))) if value > 0 and level > 0 else way
        for way, value in zip(season.ways, said, strict=True)
    ]
    return season._replace(ways=(ways[0], ways[1], ways[2]), forecasts=season.forecasts[1:])


def _tried(way: Way, error: float) -> Way:
    part = max(ERROR_NEW, 1 / (way.tried + 1))
    return Way(way.error + (error - way.error) * part, way.tried + 1)
