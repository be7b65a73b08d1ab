"""What gateways may route on: made from the state of the slots, kept on disk, replaced as a whole."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from forebay.control.plan import Plan
from forebay.core.model import Dispatch, LoadReport, ModelRoutes, Replica, Snapshot
from forebay.core.reconcile import SeenUnit, SlotState, State, UnitKey
from forebay.obs.clock import wall_s
from forebay.wire.documents import UNREADABLE


def make_routes(
    plan: Plan,
    state: State,
    units: Mapping[UnitKey, SeenUnit],
    reports: Mapping[UnitKey, LoadReport],
    before: Mapping[UnitKey, Replica],
) -> tuple[ModelRoutes, ...]:
    """Every replica that runs and whose address is known.

    One that this control has not heard yet stays as it was `before`: unknown is not gone.
    """
    slots = {s.id: s for s in state.slots}
    models = []
    for model in plan.models:
        replicas = [_replica(slots[slot.id], units, reports, before) for slot in model.units if slot.id in slots]
        known = sorted((r for r in replicas if r), key=lambda r: r.id)
        models.append(replace(model.routes, replicas=tuple(known)))
    return tuple(sorted(models, key=lambda m: m.name))


def _replica(
    s: SlotState,
    units: Mapping[UnitKey, SeenUnit],
    reports: Mapping[UnitKey, LoadReport],
    before: Mapping[UnitKey, Replica],
) -> Replica | None:
    generation = s.unit.generation if s.unit else s.leaving[-1].generation if s.leaving else 0
    key = s.id, generation
    unit, report = units.get(key), reports.get(key)
    if not unit or not unit.endpoint:
        return None
    if report is None:
        return before.get(key)
    return Replica(s.id, generation, report.revision, unit.endpoint.host, unit.endpoint.port, s.state)


class Superseded(OSError):  # noqa: N818 - a state, not a mistake
    """A control of a newer epoch has written the snapshot."""


class SnapshotFile:
    """Writes the snapshot when it has changed; versions only grow, also from one control to the next.

    If somebody else has touched the file, it is written again, as gateways that start read nothing else; unless who
    wrote it leads with a newer `epoch`.
    """

    def __init__(self, path: Path, epoch: int = 0) -> None:
        self._path = path
        self._epoch = epoch
        self._left: tuple[int, int, int] | None = None
        self.current = Snapshot(0)

    def read(self) -> None:
        """Take up what the last control has left, if anything."""
        try:
            self.current = msgspec.json.decode(self._path.read_bytes(), type=Snapshot)
            self._left = self._stamp()
        except (OSError, *UNREADABLE):
            self.current = Snapshot(int(wall_s()))  # above all that came before, should a gateway still know one

    def write(self, models: tuple[ModelRoutes, ...], dispatch: Dispatch | None = None) -> bool:
        """Replace the snapshot, unless it says the same. Raises OSError, and then it is as it was.

        Raises `Superseded` if it is one of a newer epoch.
        """
        current = self.current
        snapshot = Snapshot(current.version + 1, models, dispatch or Dispatch(), self._epoch)
        untouched = self._left is not None and self._left == self._stamp()
        if untouched and replace(snapshot, version=current.version) == current:
            return False
        if not untouched:
            self._give_way()
        draft = self._path.with_suffix(f".{self._epoch}.new")
        try:
            draft.write_bytes(msgspec.json.encode(snapshot))
            draft.replace(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self.current = snapshot
        self._left = self._stamp()
        return True

    def _give_way(self) -> None:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=Snapshot).epoch
        except (OSError, *UNREADABLE):
            return
        if found > self._epoch:
            raise Superseded(f"epoch {found} has written it, and this control has epoch {self._epoch}")

    def _stamp(self) -> tuple[int, int, int] | None:
        """Tells one content of the file from another; None if there is none."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    @property
    def replicas(self) -> dict[UnitKey, Replica]:
        """The replicas of the current snapshot."""
        return {(r.id, r.generation): r for model in self.current.models for r in model.replicas}
