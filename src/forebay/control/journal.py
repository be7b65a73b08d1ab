"""The event journal: a bounded history for the admin API, and the same events in a bounded log file."""

import contextlib
import logging
import logging.handlers
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.obs.clock import wall_s

EVENTS_MAX = 1000
FILE_BYTES_MAX = 8 * 1024 * 1024
TEXT_CHARS_MAX = 4096


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """One event. `unit` is empty if it is about control itself; `at` is wall time."""

    number: int
    at: float
    kind: str
    unit: str
    generation: int
    state: str
    why: str
    last_words: str = ""


class Journal:
    """Keeps the events. `tell` is called with each at once."""

    def __init__(self, path: Path, tell: Callable[[JournalEvent], None]) -> None:
        self._file = _File(path, maxBytes=FILE_BYTES_MAX, backupCount=1, encoding="utf-8", delay=True)
        self._tell = tell
        self._number = 0
        self.events: deque[JournalEvent] = deque(maxlen=EVENTS_MAX)

    def note(
        self, kind: str, why: str, *, unit: str = "", generation: int = 0, state: str = "", last_words: str = ""
    ) -> None:
        """Record an event."""
        self._number += 1
        words = last_words[-TEXT_CHARS_MAX:]
        event = JournalEvent(self._number, wall_s(), kind, unit, generation, state, why[:TEXT_CHARS_MAX], words)
        self.events.append(event)
        line = msgspec.json.encode(event).decode()
        self._file.handle(logging.LogRecord("forebay.control", logging.INFO, "", 0, line, None, None))
        self._tell(event)

    def since(self, number: int) -> list[JournalEvent]:
        """The events after that number, as far as they are kept."""
        return [event for event in self.events if event.number > number]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _File(logging.handlers.RotatingFileHandler):
    """A full disk costs log lines only; the history in memory continues."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """The line is not written."""

    def close(self) -> None:
        """Write what is left, if that is possible."""
        with contextlib.suppress(OSError):
            super().close()
