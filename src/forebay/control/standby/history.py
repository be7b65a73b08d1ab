"""The availability history of the models, by hour, in a small file per UTC day.

An observation counts for the time until the next one, if that comes soon; otherwise the time is unknown. So a
controller that is down or delayed leaves a gap rather than wrong figures.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from forebay.control.journal import Journal
from forebay.control.plan import Plan, PlannedModel
from forebay.control.rolling.watching import ENDS, Looked
from forebay.core.availability.history import (
    HOUR_S,
    AvailabilitySums,
    Incident,
    IncidentKind,
    ServingObservation,
    sums_of,
)
from forebay.core.availability.measured import LifetimeSums
from forebay.core.lifecycle import Event
from forebay.core.model import ReplicaState, Snapshot
from forebay.core.reconcile import SlotState
from forebay.wire.documents import UNREADABLE

DAY_S: Final = 86_400
LOOK_S_MAX: Final = 15.0
"""An observation counts for at most this long: control observes every second, and one may take ten."""
SAVE_EVERY_S: Final = 10.0
INCIDENTS_MAX: Final = 500
"""Most incidents kept per day; the others are counted."""
DAYS_MAX: Final = 400
"""Older days are removed."""
LIFETIMES_DAYS: Final = 90
"""Failure statistics are taken from this many days."""
ROLLED_BACK: Final = "rollout.rolled_back"
"""Its kind in the journal."""

_READY = ReplicaState.READY


@dataclass
class Day:
    """The content of a day's file: figures by model and hour since the epoch."""

    models: dict[str, dict[int, AvailabilitySums]] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    incidents_more: int = 0
    """Incidents that are not listed."""
    epoch: int = 0
    """Of the last leader; 0: unknown."""


class AvailabilityHistory:
    """Maintains the files in `folder`; `record` is called once per round, by one controller."""

    def __init__(self, folder: Path, journal: Journal, wall: float) -> None:
        """Load the existing files. `wall`: now, in seconds since the epoch."""
        self.folder = folder
        self._journal = journal
        self._day_number = int(wall // DAY_S)
        self._day = _read(_path(folder, self._day_number))
        self._lifetimes = _read_lifetimes(folder, self._day_number)
        self._seen: dict[str, ServingObservation] = {}
        self._looked_at = -math.inf
        self._saved_at = -math.inf
        self._events_read = 0
        self._down: dict[str, tuple[float, Incident]] = {}
        """Slots whose unit has failed, and unavailable models: since when, on the loop's clock, and the incident."""
        self._placed: dict[str, float] = {}
        self._gateway = False
        """Whether a gateway served in the last round."""

    def lifetimes(self, model: str) -> LifetimeSums:
        """Recent failure and repair statistics of a model's replicas."""
        return self._lifetimes.get(model, LifetimeSums())

    def promoted(self, model: str, seconds: float) -> None:
        """Record that a standby replica stepped in, `seconds` after the need was known."""
        self._add(model, AvailabilitySums(lived=LifetimeSums(promotions=1, promotion_s=seconds)))

    def record(self, plan: Plan, looked: Looked, published: Snapshot, now: float, wall: float) -> None:
        """Record a round, and the snapshot published in it. `now`: the loop's clock. Raises OSError."""
        self._begin_day(int(wall // DAY_S))
        self._account_since_last_round(now, wall)
        self._note_leader(published.epoch, wall)
        states = {s.id: s for s in looked.after.slots}
        restarts = {s.id: s.restarts for s in looked.before.slots}
        ends = {move.slot: move.why for move in looked.moves if move.event in ENDS}
        self._placed |= {move.slot: now for move in looked.moves if move.event is Event.PLACED}
        self._gateway = self._has_gateway([states[g.id] for g in plan.gateways if g.id in states])
        serving = {m.name: sum(r.state is _READY for r in m.replicas) for m in published.models}
        self._seen = {}
        for model in plan.models:
            name = model.routes.name
            own = [states[slot.id] for slot in model.units if slot.id in states]
            for s in own:
                if s.restarts > restarts.get(s.id, 0):
                    self._note_failure(name, s.id, ends.get(s.id, s.why), now, wall)
                self._note_ready(name, s, now, wall)
            ready = sum(s.state is _READY for s in own)
            seen = ServingObservation(_wanted(model), serving.get(name, 0), ready, self._gateway)
            self._note_outage(name, seen, own, now, wall)
            self._seen[name] = seen
        for id in self._down.keys() - states.keys() - self._seen.keys():
            del self._down[id]
        self._placed = {id: at for id, at in self._placed.items() if id in states}
        self._read_journal()
        if now - self._saved_at >= SAVE_EVERY_S:
            self._saved_at = now
            self.save()

    def today(self) -> tuple[int, Day]:
        """The number of the current day, and a copy of its content, with what no file has yet."""
        return self._day_number, msgspec.json.decode(msgspec.json.encode(self._day), type=Day)

    def save(self) -> None:
        """Write the day's file. Raises OSError, and then the file is unchanged."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = _path(self.folder, self._day_number)
        draft = path.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(self._day))
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _account_since_last_round(self, now: float, wall: float) -> None:
        """Count the last observation for the time since then; after a long pause, that time is unknown."""
        if now - self._looked_at <= LOOK_S_MAX:
            for name, seen in self._seen.items():
                self._add(name, sums_of(seen, now - self._looked_at), wall)
        else:  # another controller may have led meanwhile
            self._day = _read(_path(self.folder, self._day_number))
            self._lifetimes = _read_lifetimes(self.folder, self._day_number)
        self._looked_at = now

    def _has_gateway(self, gateways: Iterable[SlotState]) -> bool:
        """Whether a gateway serves. One that waits for its successor, as the only one, serves as it did before."""
        return any(s.state is _READY or (self._gateway and any(x.stays for x in s.leaving)) for s in gateways)

    def _note_failure(self, model: str, slot: str, why: str, now: float, wall: float) -> None:
        """The unit of a slot died or was killed. Repeated failures without becoming ready in between count as one."""
        if slot not in self._down:
            incident = Incident(wall, IncidentKind.FAILURE, model, slot, why)
            self._down[slot] = now, incident
            self._add_incident(incident)
            self._add(model, AvailabilitySums(lived=LifetimeSums(failures=1)), wall)

    def _note_ready(self, model: str, s: SlotState, now: float, wall: float) -> None:
        """Check whether a slot has become ready, for the first time or again."""
        if s.state is _READY:
            placed_at = self._placed.pop(s.id, None)
            if placed_at is not None:
                self._add(model, AvailabilitySums(lived=LifetimeSums(starts=1, start_s=now - placed_at)), wall)
            if s.id in self._down:
                self._add(
                    model,
                    AvailabilitySums(lived=LifetimeSums(repairs=1, repair_s=self._end_incident(s.id, now))),
                    wall,
                )
        elif s.unit is None:
            self._placed.pop(s.id, None)

    def _note_outage(
        self, model: str, seen: ServingObservation, own: Iterable[SlotState], now: float, wall: float
    ) -> None:
        if seen.up and model in self._down:
            self._end_incident(model, now)
        elif not seen.up and model not in self._down:
            states = ", ".join(f"{s.id} is {s.state}" for s in own) or "it has no replica"
            incident = Incident(
                wall, IncidentKind.OUTAGE, model, "", states if seen.gateway else "no gateway is ready"
            )
            self._down[model] = now, incident
            self._add_incident(incident)

    def _end_incident(self, id: str, now: float) -> float:
        """Close an incident; returns how long it lasted."""
        since, incident = self._down.pop(id)
        ended = replace(incident, lasted_s=round(now - since, 3))
        self._day.incidents = [ended if each == incident else each for each in self._day.incidents]
        self._saved_at = -math.inf
        return now - since

    def _note_leader(self, epoch: int, wall: float) -> None:
        known, self._day.epoch = self._day.epoch, epoch
        if 0 < known < epoch:
            self._add_incident(
                Incident(wall, IncidentKind.LEADER, "", "", f"another control leads, epoch {epoch} after {known}")
            )

    def _read_journal(self) -> None:
        """Process new journal events."""
        events = self._journal.events
        if not events or events[-1].number == self._events_read:
            return
        for event in self._journal.since(self._events_read):
            if event.kind == ROLLED_BACK:
                self._add_incident(Incident(event.at, IncidentKind.ROLLED_BACK, "", event.unit, event.why))
        self._events_read = events[-1].number

    def _add_incident(self, incident: Incident) -> None:
        self._saved_at = -math.inf  # write it at once
        if len(self._day.incidents) < INCIDENTS_MAX:
            self._day.incidents.append(incident)
        else:
            self._day.incidents_more += 1

    def _add(self, model: str, more: AvailabilitySums, wall: float | None = None) -> None:
        """Add to the hour of `wall`; without it, to the last one."""
        hours = self._day.models.setdefault(model, {})
        hour = max(hours, default=self._day_number * DAY_S // HOUR_S) if wall is None else int(wall // HOUR_S)
        hours[hour] = hours.get(hour, AvailabilitySums()) + more
        self._lifetimes[model] = self.lifetimes(model) + more.lived

    def _begin_day(self, number: int) -> None:
        """Start another day. An incident that has not ended stays in the file of the day it began, without an end."""
        if number == self._day_number:
            return
        self.save()
        for _, path in _files(self.folder)[:-DAYS_MAX]:
            path.unlink(missing_ok=True)
        epoch = self._day.epoch
        self._day_number, self._day = number, _read(_path(self.folder, number))
        self._day.epoch = self._day.epoch or epoch


def past(folder: Path, since: float, until: float, today: tuple[int, Day] | None = None) -> Day:
    """The history of a period in seconds since the epoch: the hours that begin in it, and its incidents.

    `today` stands for the file of its day.
    """
    found, files, current = Day(), dict(_files(folder)), dict([today] if today is not None else [])
    first = since // HOUR_S
    for number in sorted({*files, *current}):
        if not since // DAY_S <= number <= until // DAY_S:
            continue
        day = current[number] if number in current else _read(files[number])
        for model, hours in day.models.items():
            kept = found.models.setdefault(model, {})
            kept.update({hour: each for hour, each in hours.items() if first <= hour <= until // HOUR_S})
        found.incidents += [each for each in day.incidents if since <= each.at <= until]
        found.incidents_more += day.incidents_more
    return found


def _wanted(model: PlannedModel) -> int:
    """How many are to serve; a spare during replacement does not count."""
    if model.active is not None:
        return model.active
    return sum(slot is not model.spare for slot in model.slots)


def _read_lifetimes(folder: Path, today: int) -> dict[str, LifetimeSums]:
    found: dict[str, LifetimeSums] = {}
    for number, path in _files(folder):
        if number > today - LIFETIMES_DAYS:
            for model, hours in _read(path).models.items():
                for each in hours.values():
                    found[model] = found.get(model, LifetimeSums()) + each.lived
    return found


def _path(folder: Path, number: int) -> Path:
    return folder / f"{datetime.fromtimestamp(number * DAY_S, UTC).date().isoformat()}.json"


def _files(folder: Path) -> list[tuple[int, Path]]:
    """The day files, by number of days since the epoch."""
    found = []
    for path in folder.glob("*.json"):
        try:
            date = datetime.fromisoformat(path.stem).replace(tzinfo=UTC)
        except ValueError:
            continue
        found.append((int(date.timestamp()) // DAY_S, path))
    return sorted(found)


def _read(path: Path) -> Day:
    """The content of a day's file; empty if it is missing or invalid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Day)
    except (OSError, *UNREADABLE):
        return Day()
