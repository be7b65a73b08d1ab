"""A scripted device source: shows how a cluster would react, without a GPU.

A line is a JSON object: `{"device": "gpu-0", "temperature_c": 91}` changes the readings of a device, `{"device":
"gpu-0", "xid": 79}` is an error of it, and `{"fails": "no driver"}` makes all calls fail until `{"fails": ""}`.
`after_s`: when, in seconds since the script was opened; without it, a line takes effect once read. The file may grow.
Errors without `after_s` that are in it at the beginning are skipped as past.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.core.health import DeviceEvent, DeviceReading
from forebay.providers.devices.protocol import DevicesUnknown
from forebay.wire.documents import UNREADABLE

LINES_MAX: Final = 100_000


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The common fields of lines; the other fields of a reading are parsed separately."""

    device: str = ""
    xid: int | None = None
    text: str = ""
    fails: str | None = None
    after_s: float | None = None


class ScriptedSource:
    """Plays a script. `monotonic_s` and `wall_s` are clocks."""

    def __init__(self, path: Path, monotonic_s: Callable[[], float], wall_s: Callable[[], float]) -> None:
        self._path = path
        self._clock, self._wall = monotonic_s, wall_s
        self._began = monotonic_s()
        self._read_bytes = 0
        self._lines = 0
        self._first = True
        self._waiting: list[tuple[float, int, dict[str, Any]]] = []
        self._devices: dict[str, DeviceReading] = {}
        self._events: list[DeviceEvent] = []
        self._fails = ""

    def readings(self) -> tuple[DeviceReading, ...]:
        self._play()
        if self._fails:
            raise DevicesUnknown(self._fails)
        return tuple(reading for _, reading in sorted(self._devices.items()))

    def events(self) -> tuple[DeviceEvent, ...]:
        self._play()
        if self._fails:
            raise DevicesUnknown(self._fails)
        events, self._events = self._events, []
        return tuple(events)

    def close(self) -> None:
        """Does nothing: no resource is kept open."""

    def _play(self) -> None:
        """Read new lines of the file, and apply those that are due."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
        except OSError as error:
            raise DevicesUnknown(f"{self._path}: {error.strerror}") from error
        problems = []
        for text in whole.split(b"\n") if whole else ():
            self._read_bytes += len(text) + 1
            self._lines += 1
            if text.strip():
                problems.append(self._take(text))
        self._first = False
        now_s = self._clock() - self._began
        due = sorted(each[:2] for each in self._waiting if each[0] <= now_s)
        for at in due:
            line = next(each for each in self._waiting if each[:2] == at)
            self._waiting.remove(line)
            problems.append(self._happen(line[2], at[1]))
        if any(problems):
            raise DevicesUnknown(f"{self._path}:{next(filter(None, problems))}")

    def _take(self, text: bytes) -> str:
        """Schedule a line, or apply it. Returns what is wrong with it; empty: nothing."""
        number = self._lines
        try:
            line = msgspec.json.decode(text, type=dict[str, Any])
            after_s = msgspec.convert(line.pop("after_s", None), float | None)
        except UNREADABLE as error:
            return f"{number}: {error}"
        if after_s is not None:
            if len(self._waiting) >= LINES_MAX:
                return f"{number}: more than {LINES_MAX} lines wait for their time"
            self._waiting.append((after_s, number, line))
        elif "xid" not in line or not self._first:
            return self._happen(line, number)
        return ""

    def _happen(self, line: dict[str, Any], number: int) -> str:
        try:
            if "xid" in line or "fails" in line:
                said = msgspec.convert(line, Line)
                if said.xid is not None:
                    self._events.append(DeviceEvent(self._wall(), said.device, said.xid, said.text))
                self._fails = self._fails if said.fails is None else said.fails
                return ""
            unknown = sorted(set(line) - set(DeviceReading.__dataclass_fields__))
            id = line.get("device")
            if unknown or not isinstance(id, str):
                return f"{number}: a reading has no {', '.join(unknown)}" if unknown else f"{number}: names no device"
            known = asdict(self._devices[id]) if id in self._devices else {"index": len(self._devices)}
            self._devices[id] = msgspec.convert({**known, **line}, DeviceReading)
        except UNREADABLE as error:
            return f"{number}: {error}"
        return ""
