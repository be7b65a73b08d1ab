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
from forebay.core.availability.history import HOUR_S, Incident, Sight, Stretch, What, stretch
from forebay.core.availability.measured import Lived
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
LIVED_DAYS: Final = 90
"""Failure statistics are taken from this many days."""
ROLLED_BACK: Final = "rollout.rolled_back"
"""Its kind in the journal."""

_READY = ReplicaState.READY


@dataclass
class Day:
    """The content of a day's file: figures by model and hour since the epoch."""

    models: dict[str, dict[int, Stretch]] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    incidents_more: int = 0
    """Incidents that are not listed."""
    epoch: int = 0
    """Of the last leader; 0: unknown."""


class Chronicle:
    """Maintains the files in `folder`; `look` is called once per round, by one controller."""

    def __init__(self, folder: Path, journal: Journal, wall: float) -> None:
        """Load the existing files. `wall`: now, in seconds since the epoch."""
        self.folder = folder
        self._journal = journal
        self._number = int(wall // DAY_S)
        self._day = _read(_path(folder, self._number))
        self._lived = _lived(folder, self._number)
        self._sights: dict[str, Sight] = {}
        self._looked_at = -math.inf
        self._saved_at = -math.inf
        self._heard = 0
        self._down: dict[str, tuple[float, Incident]] = {}
        """Slots whose unit has failed, and unavailable models: since when, on the loop's clock, and the incident."""
        self._placed: dict[str, float] = {}

    def lived(self, model: str) -> Lived:
        """Recent failure and repair statistics of a model's replicas."""
        return self._lived.get(model, Lived())

    def promoted(self, model: str, seconds: float) -> None:
        """Record that a standby replica stepped in, `seconds` after the need was known."""
        self._add(model, Stretch(lived=Lived(promotions=1, promotion_s=seconds)))

    def look(self, plan: Plan, looked: Looked, told: Snapshot, now: float, wall: float) -> None:
        """Process a round, and what gateways were told in it. `now`: the loop's clock. Raises OSError."""
        self._turn_to(int(wall // DAY_S))
        if now - self._looked_at <= LOOK_S_MAX:
            for name, seen in self._sights.items():
                self._add(name, stretch(seen, now - self._looked_at), wall)
        else:  # another controller may have led meanwhile
            self._day = _read(_path(self.folder, self._number))
            self._lived = _lived(self.folder, self._number)
        self._looked_at = now
        self._follow(told.epoch, wall)
        states = {s.id: s for s in looked.after.slots}
        restarts = {s.id: s.restarts for s in looked.before.slots}
        ends = {move.slot: move.why for move in looked.moves if move.event in ENDS}
        self._placed |= {move.slot: now for move in looked.moves if move.event is Event.PLACED}
        gateway = any(states[g.id].state is _READY for g in plan.gateways if g.id in states)
        serving = {m.name: sum(r.state is _READY for r in m.replicas) for m in told.models}
        self._sights = {}
        for model in plan.models:
            name = model.routes.name
            own = [states[slot.id] for slot in model.units if slot.id in states]
            for s in own:
                if s.restarts > restarts.get(s.id, 0):
                    self._failed(name, s.id, ends.get(s.id, s.why), now, wall)
                self._live(name, s, now, wall)
            ready = sum(s.state is _READY for s in own)
            sight = Sight(_wanted(model), serving.get(name, 0), ready, gateway)
            self._note_outage(name, sight, own, now, wall)
            self._sights[name] = sight
        for id in self._down.keys() - states.keys() - self._sights.keys():
            del self._down[id]
        self._placed = {id: at for id, at in self._placed.items() if id in states}
        self._listen()
        if now - self._saved_at >= SAVE_EVERY_S:
            self._saved_at = now
            self.save()

    def save(self) -> None:
        """Write the day's file. Raises OSError, and then the file is unchanged."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = _path(self.folder, self._number)
        draft = path.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(self._day))
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _failed(self, model: str, slot: str, why: str, now: float, wall: float) -> None:
        """The unit of a slot died or was killed. Repeated failures without becoming ready in between count as one."""
        if slot not in self._down:
            incident = Incident(wall, What.FAILURE, model, slot, why)
            self._down[slot] = now, incident
            self._happened(incident)
            self._add(model, Stretch(lived=Lived(failures=1)), wall)

    def _live(self, model: str, s: SlotState, now: float, wall: float) -> None:
        """Check whether a slot has become ready, for the first time or again."""
        if s.state is _READY:
            placed_at = self._placed.pop(s.id, None)
            if placed_at is not None:
                self._add(model, Stretch(lived=Lived(starts=1, start_s=now - placed_at)), wall)
            if s.id in self._down:
                self._add(model, Stretch(lived=Lived(repairs=1, repair_s=self._over(s.id, now))), wall)
        elif s.unit is None:
            self._placed.pop(s.id, None)

    def _note_outage(self, model: str, sight: Sight, own: Iterable[SlotState], now: float, wall: float) -> None:
        if sight.up and model in self._down:
            self._over(model, now)
        elif not sight.up and model not in self._down:
            states = ", ".join(f"{s.id} is {s.state}" for s in own) or "it has no replica"
            incident = Incident(wall, What.OUTAGE, model, "", states if sight.gateway else "no gateway is ready")
            self._down[model] = now, incident
            self._happened(incident)

    def _over(self, id: str, now: float) -> float:
        """Close an incident; returns how long it lasted."""
        since, incident = self._down.pop(id)
        ended = replace(incident, lasted_s=round(now - since, 3))
        self._day.incidents = [ended if each == incident else each for each in self._day.incidents]
        self._saved_at = -math.inf
        return now - since

    def _follow(self, epoch: int, wall: float) -> None:
        known, self._day.epoch = self._day.epoch, epoch
        if 0 < known < epoch:
            self._happened(Incident(wall, What.LEADER, "", "", f"another control leads, epoch {epoch} after {known}"))

    def _listen(self) -> None:
        """Process new journal events."""
        events = self._journal.events
        if not events or events[-1].number == self._heard:
            return
        for event in self._journal.since(self._heard):
            if event.kind == ROLLED_BACK:
                self._happened(Incident(event.at, What.ROLLED_BACK, "", event.unit, event.why))
        self._heard = events[-1].number

    def _happened(self, incident: Incident) -> None:
        self._saved_at = -math.inf  # write it at once
        if len(self._day.incidents) < INCIDENTS_MAX:
            self._day.incidents.append(incident)
        else:
            self._day.incidents_more += 1

    def _add(self, model: str, more: Stretch, wall: float | None = None) -> None:
        """Add to the hour of `wall`; without it, to the last one."""
        hours = self._day.models.setdefault(model, {})
        hour = max(hours, default=self._number * DAY_S // HOUR_S) if wall is None else int(wall // HOUR_S)
        hours[hour] = hours.get(hour, Stretch()) + more
        self._lived[model] = self.lived(model) + more.lived

    def _turn_to(self, number: int) -> None:
        """Start another day. An incident that has not ended stays in the file of the day it began, without an end."""
        if number == self._number:
            return
        self.save()
        for _, path in _files(self.folder)[:-DAYS_MAX]:
            path.unlink(missing_ok=True)
        epoch = self._day.epoch
        self._number, self._day = number, _read(_path(self.folder, number))
        self._day.epoch = self._day.epoch or epoch


def past(folder: Path, since: float, until: float) -> Day:
    """The history of a period in seconds since the epoch: the hours that begin in it, and its incidents."""
    found = Day()
    first = since // HOUR_S
    for number, path in _files(folder):
        if not since // DAY_S <= number <= until // DAY_S:
            continue
        day = _read(path)
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


def _lived(folder: Path, today: int) -> dict[str, Lived]:
    found: dict[str, Lived] = {}
    for number, path in _files(folder):
        if number > today - LIVED_DAYS:
            for model, hours in _read(path).models.items():
                for each in hours.values():
                    found[model] = found.get(model, Lived()) + each.lived
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
