"""What load to expect: from where it is heading, from the time of the day, or from that of the week.

Which of the three is asked is decided by how well each has done: their forecasts are kept until they are due. The
profile of a week is learned in bins of ten minutes, and counts by its shape alone: the level is that of now.
"""

import math
from typing import Final, NamedTuple

BIN_S: Final = 600.0
DAY_BINS: Final = 144
WEEK_BINS: Final = 7 * DAY_BINS
NEW: Final = 0.4
"""How much a week counts against all that came before."""
RATIO_MAX: Final = 4.0
"""Nothing is expected to grow more than so many times, or to fall below the inverse of it."""
OPEN_MAX: Final = 24
"""Forecasts that are not due yet."""
FORECAST_EVERY_S: Final = 60.0
ERROR_NEW: Final = 0.002
"""How much one forecast counts against all before: errors are those of some hours."""
ERROR_USUAL: Final = 0.1
TRIED_MIN: Final = 30
"""A season is asked when so many of its forecasts were due."""


class Way(NamedTuple):
    """How well one way of forecasting has done."""

    error: float = ERROR_USUAL
    """Mean distance of the logarithms of what it said and what came."""
    tried: int = 0


class Forecast(NamedTuple):
    """What the three ways have said, in their order; 0: nothing."""

    due: float
    trend: float
    day: float
    week: float


class Season(NamedTuple):
    """Of one model. Loads are work per second; 0: unknown."""

    week: tuple[float, ...] = ()
    """From Thursday, 0:00 UTC on, as the epoch began; empty: nothing is known."""
    bin: int = -1
    """Of the week, that is being filled."""
    mean: float = 0.0
    """Of the level in it until now."""
    looks: int = 0
    ways: tuple[Way, Way, Way] = (Way(), Way(), Way())
    """By the trend, the time of the day, the time of the week."""
    forecasts: tuple[Forecast, ...] = ()
    """Not due yet, the oldest first."""


def learned(season: Season, level: float, slope: float, horizon_s: float, now: float) -> Season:
    """With the level of now, which changes by `slope` a second. Forecasts are judged at `horizon_s`."""
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


def expected(season: Season, level: float, slope: float, ahead_s: float, now: float) -> float:
    """The level in so many seconds, by the way that has done best."""
    way = best(season)
    found = 0.0 if way == 0 else _by(season, 7 if way == 1 else 1, level, ahead_s, now)
    return found or _trend(level, slope, ahead_s)


def best(season: Season) -> int:
    """The way that is asked: 0 the trend, 1 the time of the day, 2 the time of the week."""
    ways = season.ways
    fit = [way for way in range(3) if way == 0 or ways[way].tried >= TRIED_MIN]
    return min(fit, key=lambda way: (ways[way].error, way))


def _trend(level: float, slope: float, ahead_s: float) -> float:
    return min(max(level + slope * ahead_s, level / RATIO_MAX), level * RATIO_MAX)


def _by(season: Season, days: int, level: float, ahead_s: float, now: float) -> float:
    """By the shape of the week (`days` 1), or of all its days that are known (7); 0: not known."""
    here, there = _shape(season, days, now), _shape(season, days, now + ahead_s)
    if here <= 0 or there <= 0:
        return 0.0
    return level * min(max(there / here, 1 / RATIO_MAX), RATIO_MAX)


def _shape(season: Season, days: int, at: float) -> float:
    """The profile at a time, linear between the middles of its bins; 0: not known."""
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
    """With the bin that is over in the profile."""
    if season.bin < 0 or season.mean <= 0:
        return season
    week = list(season.week or (0.0,) * WEEK_BINS)
    before = week[season.bin]
    value = before + (season.mean - before) * NEW if before > 0 else season.mean
    week[season.bin] = float(f"{value:.4g}")
    return season._replace(week=tuple(week))


def _judged(season: Season, level: float) -> Season:
    """The oldest forecast is due."""
    said = season.forecasts[0][1:]
    ways = [
        _tried(way, abs(math.log(level / value))) if value > 0 and level > 0 else way
        for way, value in zip(season.ways, said, strict=True)
    ]
    return season._replace(ways=(ways[0], ways[1], ways[2]), forecasts=season.forecasts[1:])


def _tried(way: Way, error: float) -> Way:
    part = max(ERROR_NEW, 1 / (way.tried + 1))
    return Way(way.error + (error - way.error) * part, way.tried + 1)
