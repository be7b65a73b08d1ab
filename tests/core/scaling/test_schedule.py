"""Hours of the week, in time zones whose clocks change."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from forebay.core.scaling.schedule import Hours, days_of, is_zone, minutes_of

BERLIN = "Europe/Berlin"
WORK = Hours((0, 1, 2, 3, 4), 8 * 60, 20 * 60, BERLIN)
NIGHT = Hours((4,), 22 * 60, 6 * 60, BERLIN)


def at(text: str, zone: str = BERLIN, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


@pytest.mark.parametrize(
    ("hours", "when", "holds"),
    [
        (WORK, "2026-03-27T08:00", True),
        (WORK, "2026-03-27T07:59", False),
        (WORK, "2026-03-27T20:00", False),
        (WORK, "2026-03-28T12:00", False),  # a Saturday
        (WORK, "2026-03-30T08:00", True),  # the Monday after clocks were put forward
        (NIGHT, "2026-03-27T22:00", True),
        (NIGHT, "2026-03-28T05:59", True),
        (NIGHT, "2026-03-28T06:00", False),
        (NIGHT, "2026-03-27T05:00", False),  # the morning of a Friday belongs to Thursday's night
        (Hours((0,), 8 * 60, 8 * 60, BERLIN), "2026-03-31T07:59", True),  # a whole day
    ],
)
def test_schedule_hours_follow_local_time(hours: Hours, when: str, holds: bool) -> None:
    assert hours.hold(at(when)) is holds


def test_schedule_hours_shrink_or_grow_at_clock_changes() -> None:
    night = Hours((5,), 0, 6 * 60, BERLIN)._replace(days=(6,))
    spring, autumn = at("2026-03-29T00:00"), at("2026-10-25T00:00")

    lengths = [sum(night.hold(start + 60 * minute) for minute in range(24 * 60)) / 60 for start in (spring, autumn)]

    assert lengths == [5.0, 7.0]


def test_repeated_hour_at_a_clock_change_counts_twice() -> None:
    two = Hours((6,), 2 * 60, 3 * 60, BERLIN)

    assert two.hold(at("2026-10-25T02:30"))
    assert two.hold(at("2026-10-25T02:30", fold=1))


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("mon", (0,)),
        ("mon-fri", (0, 1, 2, 3, 4)),
        ("sat,sun", (5, 6)),
        ("sat-mon", (0, 5, 6)),
        ("wed-wed,mon", (0, 2)),
    ],
)
def test_days_are_parsed_as_lists_and_ranges(text: str, days: tuple[int, ...]) -> None:
    assert days_of(text) == days


def test_times_are_parsed_as_minutes_from_midnight() -> None:
    assert [minutes_of(text) for text in ("00:00", "08:30", "24:00")] == [0, 510, 1440]


@pytest.mark.parametrize(
    ("name", "known"),
    [("UTC", True), (BERLIN, True), ("Mars/Olympus", False), ("", False), ("../x", False), ("Europe", False)],
)
def test_time_zones_are_those_of_the_tz_database(name: str, known: bool) -> None:
    assert is_zone(name) is known
