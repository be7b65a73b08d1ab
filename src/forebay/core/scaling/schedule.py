"""Bounds that depend on the time of the week, in the time zone of those who wrote them."""

from datetime import datetime
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

WEEK: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY: Final = f"({'|'.join(WEEK)})"
DAYS_PATTERN: Final = rf"^{_DAY}(-{_DAY})?(,{_DAY}(-{_DAY})?)*$"
TIME_PATTERN: Final = r"^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$"


class Hours(NamedTuple):
    """Times of the week with bounds of their own. When clocks are put back, an hour comes twice."""

    days: tuple[int, ...]
    """Days on which it begins; Monday is 0."""
    start_min: int
    """Minutes from midnight on, 0..1440."""
    end_min: int
    """On the next day if it is not after the start."""
    zone: str
    """IANA name; one that `zoneinfo` knows."""
    min: int | None = None
    max: int | None = None

    def hold(self, now: float) -> bool:
        """Whether it is one of these times, at `now` seconds since the epoch."""
        local = datetime.fromtimestamp(now, ZoneInfo(self.zone))
        today, minute = local.weekday(), local.hour * 60 + local.minute
        if self.start_min < self.end_min:
            return today in self.days and self.start_min <= minute < self.end_min
        return (today in self.days and minute >= self.start_min) or (
            (today - 1) % 7 in self.days and minute < self.end_min
        )


def days_of(text: str) -> tuple[int, ...]:
    """Days of a list that fits DAYS_PATTERN: `mon-fri,sun`; a range may go over Sunday."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin = WEEK.index(first)
        length = (WEEK.index(last or first) - begin) % 7
        found.update((begin + offset) % 7 for offset in range(length + 1))
    return tuple(sorted(found))


def minutes_of(text: str) -> int:
    """Minutes from midnight to a time that fits TIME_PATTERN."""
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)


def is_zone(name: str) -> bool:
    """Whether there is such a time zone."""
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # none such; no name of one; the name of a folder of them
        return False
    return True
