"""Control that scales a world on virtual time: in-memory units and gateways with scripted load."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.control.deploying.rig import RULES, Rig, inline
from tests.control.deploying.world import FaultyStore, World, WorldProber, artifact

from forebay.control.deploying import Deployments
from forebay.control.journal import Journal
from forebay.control.loop import Controller
from forebay.control.plan import Plan, make_plan
from forebay.control.scaling.scaler import Scaler
from forebay.control.snapshot import SnapshotFile
from forebay.core.cluster import Cluster
from forebay.core.pressure import Pressure, TrafficCounters
from forebay.core.reconcile import ObservedUnit
from forebay.obs.metrics import Metrics
from forebay.sim.loop import run
from forebay.store.database import open_store
from forebay.store.documents import Documents
from forebay.store.rollouts import Rollouts
from forebay.store.schema import SCALES

HPA: Mapping[str, object] = {
    "max": 6,
    "policy": "hpa",
    "target": 2,
    "signals": [],
    "up": {"window_s": 0},
    "down": {"window_s": 0},
    "to_zero_after_s": 30,
}
"""Two requests for each replica; a rule that does not learn."""


@dataclass
class Crowd:
    """What one gateway is asked for: `load` requests at any time, each of which takes a second."""

    load: float = 0.0
    silent: bool = False
    predicted_ttft_s: float | None = None
    instance: str = "one"
    born: float = 0.0
    counted: dict[str, TrafficCounters] = field(default_factory=dict)
    at: float = 0.0

    def told(self, waits: bool) -> TrafficCounters:
        now = asyncio.get_running_loop().time()
        seconds, self.at = now - self.at, now
        before = self.counted.get("chat", TrafficCounters())
        pressed = TrafficCounters(
            arrivals=before.arrivals + round(seconds * self.load),
            completions=before.completions + round(seconds * self.load),
            stay_s=before.stay_s + seconds * self.load,
            waiting=round(self.load) if waits else 0,
            predicted_ttft_s=self.predicted_ttft_s,
        )
        self.counted["chat"] = pressed
        return pressed

    def restart(self) -> None:
        self.born = asyncio.get_running_loop().time()
        self.instance += "'"
        self.counted = {}


class CrowdProber(WorldProber):
    """Asks a crowd for each gateway."""

    def __init__(self, world: World, crowds: Mapping[str, Crowd]) -> None:
        super().__init__(world)
        self._crowds = crowds
        self._own = world

    async def pressures(self, units: Iterable[ObservedUnit]) -> dict[str, Pressure]:
        now = asyncio.get_running_loop().time()
        slots = sorted({unit.slot for unit in units if unit.alive and unit.slot in self._crowds})
        there = self._own.places.snapshot.exists()
        waits = not there or not any(r.state == "ready" for r in self._own.routes.replicas)
        return {
            slot: Pressure(crowd.instance, now - crowd.born, {"chat": crowd.told(waits)})
            for slot in slots
            if not (crowd := self._crowds[slot]).silent
        }


@dataclass
class Scaling:
    """A control that scales, and who asks for what."""

    rig: Rig
    scaler: Scaler
    crowds: dict[str, Crowd]

    @property
    def crowd(self) -> Crowd:
        return self.crowds["gateway-0"]

    @property
    def slots(self) -> list[str]:
        return sorted(self.rig.world.alive())

    async def has(self, several: int, within_s: float = 1500.0) -> None:
        """So many replicas are ready, and no other runs."""
        world = self.rig.world
        await self.rig.until(
            lambda: (
                world.places.snapshot.exists()
                and len(world.alive()) == several
                and sum(r.state == "ready" for r in world.routes.replicas) == several
            ),
            within_s,
        )

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.rig.world.journal if event.kind.startswith("scale.")]


def plan_of(
    world: World,
    scale: Mapping[str, object] | None = HPA,
    *,
    gateways: int = 1,
    others: Sequence[Mapping[str, object]] = (),
    limits: Mapping[str, object] | None = None,
    **model: object,
) -> Plan:
    """A cluster with the model `chat`, and `other` with other settings."""
    settings = {"name": "chat", "task": "chat", "source": "synthetic", "engine": "synthetic", "scale": scale, **model}
    gateway = {"port": 8080, "records": {}, "processes": gateways}
    models = [settings, *({**settings, "name": "other", **other} for other in others)]
    cluster = Cluster.model_validate({"models": models, "gateway": gateway, "limits": limits or {}})
    return make_plan(cluster, {name: artifact(world.declared) for name in ("chat", "other")}, world.places, "0")


async def started(
    world: World, plan: Plan, crowds: dict[str, Crowd] | None = None, *, store_down: str = ""
) -> Scaling:
    """A control that runs until it is killed; the store may be down when it wants to know of its scaling."""
    journal, metrics = Journal(world.places.log, world.journal.append), Metrics()
    deployments = Deployments(Rollouts(lambda: world.store, "test"), world.shelf, inline, note=journal.note)
    scaler = Scaler(
        Documents(SCALES, lambda: world.store, "test"),
        inline,
        note=journal.note,
        metrics=metrics,
        recall=world.folder / "scaling.json",
    )
    crowds = crowds or {slot.id: Crowd() for slot in plan.gateways}
    await deployments.begin(plan)
    if isinstance(world.store, FaultyStore):
        world.store.down = store_down
    control = Controller(
        plan,
        world.provider,
        CrowdProber(world, crowds),
        snapshot=SnapshotFile(world.places.snapshot),
        journal=journal,
        metrics=metrics,
        rules=RULES,
        deployments=deployments,
        scaler=scaler,
    )
    task = asyncio.get_running_loop().create_task(control.run())
    return Scaling(Rig(world, control, deployments, journal, task, metrics), scaler, crowds)


@asynccontextmanager
async def controlled(
    world: World, plan: Plan, crowds: dict[str, Crowd] | None = None, *, store_down: str = ""
) -> AsyncIterator[Scaling]:
    """At the end control is cut off, as if it were killed: units run on."""
    scaling = await started(world, plan, crowds, store_down=store_down)
    try:
        yield scaling
    finally:
        await scaling.rig.kill()


def play(folder: Path, test: Callable[[World], Awaitable[None]]) -> None:
    """On virtual time, with a store in a file."""
    store = FaultyStore(open_store(f"sqlite:///{folder / 'store.db'}"))

    async def played() -> None:
        await test(World(folder, store, replicas=1))

    try:
        run(played(), seconds_max=100_000.0)
    finally:
        store.close()
