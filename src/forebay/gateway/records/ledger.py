"""The usage ledger of one gateway: requests and tokens by day, tenant, model and outcome.

One small file per day, rewritten every few seconds, holds the number of the last audit line counted in it;
`usage.json` holds the line up to which everything is counted. So after a kill the unsaved part is recounted from the
audit lines, and no line is counted twice.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from forebay.core.errors import CLIENT_CLOSED, OK, TABLE, Code
from forebay.gateway.records.audit import lines_after
from forebay.gateway.records.facts import Used
from forebay.gateway.records.saved import (
    DAY_S,
    POSITION,
    Day,
    Position,
    Row,
    Sums,
    day_file,
    day_files,
    read_day,
    read_position,
    take_day,
)
from forebay.gateway.records.writer import replace_file

ROWS_MAX: Final = 10_000
"""Maximum rows per day; the rest is counted under `OTHER`."""
OTHER: Final = "other"
DAYS_MAX: Final = 400
"""Older days are removed."""
REPLAY_FILES_MAX: Final = 4
"""How many audit files are searched for uncounted lines."""
OUTCOMES: Final = {code.value: row.blame.value for code, row in TABLE.items()} | {
    OK: "ok",
    CLIENT_CLOSED: "cancelled",
    Code.SLOW_CONSUMER.value: "cancelled",
}
"""Outcome by code: `ok`, `cancelled`, or who is to blame for the error."""

Key = tuple[str, str, str]
"""Tenant, model, outcome."""


class Tally:
    """Running sums in memory; `Sums` are the same in files."""

    __slots__ = ("cached_tokens", "completion_tokens", "estimated", "prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.estimated = 0

    def count(self, used: Used) -> None:
        """Add a request."""
        self.requests += 1
        self.prompt_tokens += used.prompt
        self.completion_tokens += used.completion
        self.cached_tokens += used.cached
        self.estimated += used.estimated

    def add(self, sums: "Sums | Tally") -> None:
        """Add saved sums, or those of another tally."""
        self.requests += sums.requests
        self.prompt_tokens += sums.prompt_tokens
        self.completion_tokens += sums.completion_tokens
        self.cached_tokens += sums.cached_tokens
        self.estimated += sums.estimated

    def row(self, key: Key) -> Row:
        """The row to save."""
        tenant, model, outcome = key
        return Row(
            self.requests, self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.estimated,
            tenant=tenant, model=model, outcome=outcome,
        )  # fmt: skip


class Ledger:
    """Counts in memory; `checkpoint` saves. Counting works before `start`, which adds what was saved earlier."""

    def __init__(self) -> None:
        self.damaged: list[Path] = []
        """Where files that could not be parsed were moved, until someone has been told."""
        self._days: dict[int, dict[Key, Tally]] = {}
        self._read: set[int] = set()
        self._dirty: set[int] = set()
        self._folder = Path()
        self._seq = 0
        self._today = 0
        self._today_at = -math.inf
        self._rows: dict[Key, Tally] = {}
        self._news = False  # today's file is out of date

    def count(self, ts: float, tenant: str, model: str, code: str, used: Used) -> None:
        """Count a request that ended at `ts`, seconds since the epoch."""
        if not 0.0 <= ts - self._today_at < DAY_S:
            self._turn_to(int(ts // DAY_S))
        key = (tenant, model, OUTCOMES.get(code, OTHER))
        tally = self._rows.get(key)
        if tally is None:
            tally = _new(self._rows, key)
        tally.count(used)
        self._news = True

    def take(self, other: "Ledger") -> None:
        """Add the counts of another ledger, which is not used any more."""
        for day, rows in other._days.items():
            self._turn_to(day)
            for key, tally in rows.items():
                (self._rows.get(key) or _new(self._rows, key)).add(tally)
            self._news = True

    def _turn_to(self, day: int) -> None:
        """Count on that day from now on."""
        self._note_today()
        self._today, self._today_at = day, float(day * DAY_S)
        self._rows = self._days.setdefault(day, {})

    def _note_today(self) -> None:
        if self._news:
            self._dirty.add(self._today)
            self._news = False

    @property
    def dirty(self) -> bool:
        """Whether there is something to save."""
        return self._news or bool(self._dirty)

    def start(self, folder: Path) -> None:
        """Add what an earlier process counted, and what its audit lines add to that. Raises OSError."""
        seq, days, found = read_position(folder), _days(folder), dict[tuple[int, Key], Sums]()
        for late in _not_counted(folder, seq, days):
            found.setdefault((late.day, late.key), Sums()).add(late.sums)
            seq = max(seq, late.seq)
        for (day, key), sums in found.items():
            rows = self._days.setdefault(day, {})
            (rows.get(key) or _new(rows, key)).add(sums)
            self._dirty.add(day)
        for day in (day for day, content in days.items() if content.seq < 0):  # to be replaced, so as to search once
            self._days.setdefault(day, {})
            self._dirty.add(day)
        self._folder, self._seq = folder, seq

    def checkpoint(self, seq: int | None) -> None:
        """Save. `seq`: the last audit line that is written and counted; None: no audit log. Raises OSError."""
        self._seq = self._seq if seq is None else seq
        self._note_today()
        for day in sorted(self._dirty):
            rows, path = self._days[day], day_file(self._folder, day)
            if day not in self._read:  # another process, or this one earlier, may have counted on that day
                before, kept = take_day(path)
                if kept is not None:
                    self.damaged.append(kept)
                for row in before.rows:
                    key = (row.tenant, row.model, row.outcome)
                    (rows.get(key) or _new(rows, key)).add(row)
                self._read.add(day)
            saved = [rows[key].row(key) for key in sorted(rows)]
            replace_file(path, msgspec.json.encode(Day(self._seq, saved)))
        replace_file(self._folder / POSITION, msgspec.json.encode(Position(self._seq)))
        newest = max(self._dirty, default=0)
        self._dirty.clear()
        over = [day for day in self._days if day < newest]
        for day in over:
            del self._days[day]
            self._read.discard(day)
            self._today_at = -math.inf  # it may be the current one
        if over:
            for _, path in day_files(self._folder)[:-DAYS_MAX]:
                path.unlink(missing_ok=True)


_NO_FILE: Final = Day()


def _days(folder: Path) -> dict[int, Day]:
    """The files of all days. Raises OSError."""
    return {day: read_day(path) for day, path in day_files(folder)}


class _Late(NamedTuple):
    """A request that no file has counted."""

    seq: int
    day: int
    key: Key
    sums: Sums


def _not_counted(folder: Path, position: int, days: dict[int, Day]) -> Iterator[_Late]:
    """Audit lines that the files of the days do not include; of a day whose file is damaged, all that there are.

    Raises OSError.
    """
    damaged = any(content.seq < 0 for content in days.values())
    for line in lines_after(folder, 0 if damaged else position, REPLAY_FILES_MAX):
        day = int(line.ts // DAY_S)
        counted = days.get(day, _NO_FILE).seq
        if line.seq > (counted if counted < 0 else max(counted, position)):
            tokens = (line.prompt_tokens, line.completion_tokens, line.cached_tokens)
            key = (line.tenant, line.model, OUTCOMES.get(line.code, OTHER))
            yield _Late(line.seq, day, key, Sums(1, *tokens, int(line.estimated)))


def usage(folder: Path, day_first: int) -> dict[tuple[int, Key], Sums]:
    """All usage of a gateway since that day (days since the epoch), up to its last audit line. Raises OSError."""
    position = read_position(folder)  # read first: whatever is saved from here on is in the files of the days
    days = _days(folder)
    found: dict[tuple[int, Key], Sums] = {}
    for day, content in days.items():
        for row in content.rows:
            found.setdefault((day, (row.tenant, row.model, row.outcome)), Sums()).add(row)
    for late in _not_counted(folder, position, days):
        found.setdefault((late.day, late.key), Sums()).add(late.sums)
    return {place: sums for place, sums in found.items() if place[0] >= day_first}


def _new(rows: dict[Key, Tally], key: Key) -> Tally:
    if len(rows) >= ROWS_MAX:
        key = (OTHER, OTHER, key[2])
    return rows.setdefault(key, Tally())
