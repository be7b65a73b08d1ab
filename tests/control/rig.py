"""A control plane over stand-ins, or over units in memory, inside the test's own loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tests.control.units import local

from forebay.control.journal import Journal, JournalEvent
from forebay.control.loop import Controller
from forebay.control.placing.placer import Placer
from forebay.control.plan import Places, Plan, PlannedModel
from forebay.control.probe import Prober
from forebay.control.snapshot import SnapshotFile
from forebay.control.status import ReplicaStatus, Status, make_status
from forebay.core.cluster import Slo
from forebay.core.model import GatewaySpec, ModelRoutes, Policy, Snapshot, Task
from forebay.core.reconcile import Kind, Rules, Slot
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics
from forebay.providers.protocol import Provider

WAIT_S = 20.0
POLL_S = 0.02


def gateway(folder: Path) -> Slot:
    places = Places(folder)
    spec = GatewaySpec("gateway-0", 0, "127.0.0.1", 0, str(places.snapshot), "", str(places.peers))
    return Slot("gateway-0", Kind.GATEWAY, "gateway", 0, "g", spec, drain_grace_s=5.0)


def plan(folder: Path, *slots: Slot, with_gateway: bool = True) -> Plan:
    """One model per group of slots."""
    groups = sorted({slot.group for slot in slots})
    models = tuple(
        PlannedModel(
            ModelRoutes(group, Task.CHAT, Policy.P2C, "r-1", 10, 1.0),
            "synthetic",
            "synthetic",
            Slo(availability=0.99),
            tuple(s for s in slots if s.group == group),
        )
        for group in groups
    )
    return Plan("test", "http://127.0.0.1:8080", (gateway(folder),) if with_gateway else (), models)


@dataclass
class Rig:
    """A control plane that runs."""

    control: Controller
    journal: Journal
    metrics: Metrics
    folder: Path
    task: asyncio.Task[None]

    def status(self) -> Status:
        return make_status(self.control, asyncio.get_running_loop().time(), wall_s())

    def replica(self, id: str = "chat-0") -> ReplicaStatus:
        return next(r for m in self.status().models for r in m.replicas if r.id == id)

    def snapshot(self) -> Snapshot:
        return msgspec.json.decode(Places(self.folder).snapshot.read_bytes(), type=Snapshot)

    def events(self, unit: str = "") -> list[JournalEvent]:
        return [e for e in self.journal.events if unit in ("", e.unit)]

    async def until(self, holds: Callable[[], object]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while not holds():
                    await asyncio.sleep(POLL_S)
                return
        raise AssertionError(f"never came true: {self.status()} {self.events()}")


@asynccontextmanager
async def controlled(
    folder: Path,
    wanted: Plan,
    provider: Provider | None = None,
    rules: Rules | None = None,
    placer: Placer | None = None,
) -> AsyncIterator[Rig]:
    """Run control; at the end it is cut off, as if it were killed: units run on."""
    provider = provider or local(folder)
    prober, journal, metrics = (
        Prober(Places(folder).peers),
        Journal(Places(folder).log, lambda event: None),
        Metrics(),
    )
    control = Controller(
        wanted,
        provider,
        prober,
        snapshot=SnapshotFile(Places(folder).snapshot),
        journal=journal,
        metrics=metrics,
        rules=rules or Rules(),
        placer=placer,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(control.run())
            yield Rig(control, journal, metrics, folder, task)
            task.cancel()
    finally:
        provider.close()
        journal.close()
