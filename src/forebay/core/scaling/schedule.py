"""Bounds that depend on the time of the week, in a configured time zone."""

from datetime import datetime
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

WEEK: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY: Final = f"({'|'.join(WEEK)})"
DAYS_PATTERN: Final = rf"^{_DAY}(-{_DAY})?(,{_DAY}(-{_DAY})?)*$"
TIME_PATTERN: Final = r"^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$"


class Hours(NamedTuple):
    """Times of the week with their own bounds. When clocks are set back, an hour occurs twice."""

    days: tuple[int, ...]
    """Days on which it begins; Monday is 0."""
    start_min: int
    """Minutes from midnight, 0..1440."""
    end_min: int
    """On the next day if not after the start."""
    zone: str
    """IANA name, known to `zoneinfo`."""
    min: int | None = None
    max: int | None = None

    def hold(self, now: float) -> bool:
        """Whether `now` (seconds since the epoch) is one of these times."""
        local = datetime.fromtimestamp(now, ZoneInfo(self.zone))
        today, minute = local.weekday(), local.hour * 60 + local.minute
        if self.start_min < self.end_min:
            return today in self.days and self.start_min <= minute < self.end_min
        return (today in self.days and minute >= self.start_min) or (
            (today - 1) % 7 in self.days and minute < self.end_min
        )


def days_of(text: str) -> tuple[int, ...]:
    """The days of a list that matches DAYS_PATTERN: `mon-fri,sun`; ranges may wrap around Sunday."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin = WEEK.index(first)
        length = (WEEK.index(last or first) - begin) % 7
        found.update((begin + offset) % 7 for offset in range(length + 1))
    return tuple(sorted(found))


def minutes_of(text: str) -> int:
    """Minutes from midnight to a time that matches TIME_PATTERN."""
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)


def is_zone(name: str) -> bool:
    """Whether the time zone exists."""
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown; not a valid name; the name of a folder
        return False
    return True
