"""The routing snapshot: built from the state of the slots, kept on disk, replaced atomically."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from forebay.control.plan import Plan
from forebay.core.model import Dispatch, LoadReport, ModelRoutes, Replica, Snapshot
from forebay.core.reconcile import ObservedUnit, SlotState, State, UnitKey
from forebay.core.tenancy import Tenant
from forebay.obs.clock import wall_s
from forebay.wire.documents import UNREADABLE


def make_routes(
    plan: Plan,
    state: State,
    units: Mapping[UnitKey, ObservedUnit],
    reports: Mapping[UnitKey, LoadReport],
    before: Mapping[UnitKey, Replica],
) -> tuple[ModelRoutes, ...]:
    """The routes to every replica that runs and whose address is known.

    A replica that this controller has no report of yet stays as it was `before`: unknown does not mean gone.
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
    units: Mapping[UnitKey, ObservedUnit],
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
    """A controller of a newer epoch has written the snapshot."""


class SnapshotFile:
    """Writes the snapshot when it has changed; versions only increase, across controllers, too.

    If another process has modified the file, it is rewritten, as starting gateways read only the file; unless it was
    written by a leader with a newer `epoch`.
    """

    def __init__(self, path: Path, epoch: int = 0) -> None:
        self._path = path
        self._epoch = epoch
        self._left: tuple[int, int, int] | None = None
        self.current = Snapshot(0)

    def read(self) -> None:
        """Continue from the previous controller's snapshot, if there is one."""
        try:
            self.current = msgspec.json.decode(self._path.read_bytes(), type=Snapshot)
            self._left = self._stamp()
        except (OSError, *UNREADABLE):
            self.current = Snapshot(int(wall_s()))  # above all previous versions, in case a gateway still has one

    def write(
        self,
        models: tuple[ModelRoutes, ...],
        dispatch: Dispatch | None = None,
        tenants: tuple[Tenant, ...] | None = None,
    ) -> bool:
        """Replace the snapshot, unless unchanged. Raises OSError, and then the file is unchanged.

        Raises `Superseded` if the file is of a newer epoch.
        """
        current = self.current
        snapshot = Snapshot(current.version + 1, models, dispatch or Dispatch(), self._epoch, tenants)
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
            raise Superseded(f"it was written by epoch {found}, and this controller has epoch {self._epoch}")

    def _stamp(self) -> tuple[int, int, int] | None:
        """Identifies the file's content; None if there is no file."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    @property
    def replicas(self) -> dict[UnitKey, Replica]:
        """The replicas of the current snapshot."""
        return {(r.id, r.generation): r for model in self.current.models for r in model.replicas}
