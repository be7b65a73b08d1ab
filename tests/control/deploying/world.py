"""The world outside control: in-memory units, gateways that follow the snapshot, a store that can fail."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
from sqlalchemy import Connection
from tests.control.fakes.provider import MemoryProvider

from forebay.control.deploying import DeployRefused
from forebay.control.journal import JournalEvent
from forebay.control.plan import Artifact, Places, Plan, make_plan
from forebay.control.probe import Prober
from forebay.core.cluster import Cluster
from forebay.core.deploy.samples import Observed, Sample
from forebay.core.errors import OK
from forebay.core.model import LoadReport, ModelRoutes, ReplicaState, Snapshot, WorkerSpec
from forebay.core.reconcile import Answer, Answered, Kind, ObservedUnit, Slot, UnitKey
from forebay.core.revision import revision_id
from forebay.core.rollout import Arm
from forebay.core.tenancy import Demand
from forebay.obs.clock import wall_s
from forebay.store.database import Store, StoreDown

READY = ReplicaState.READY
START_S = 2.0


async def wait(seconds: float) -> None:
    """Virtual time passes."""
    await asyncio.sleep(seconds)


def artifact(name: str) -> Artifact:
    """A revision is what it says."""
    return Artifact(Path("synthetic"), "synthetic", "synthetic", {"reply": name})


def revision(name: str) -> str:
    return revision_id("synthetic", "synthetic", {"reply": name})


NEW, OLD = revision("new"), revision("old")


class FakeRevisions:
    """Three revisions by name; `broken` ones cannot be prepared."""

    def __init__(self) -> None:
        self.names = {revision(name): name for name in ("old", "new", "newer")}
        self.broken: dict[str, str] = {}
        self.prepared: list[str] = []
        self.takes_s = 0.5

    def find(self, model: str, name: str) -> str:
        found = name if name in self.names else revision(name)
        if found not in self.names:
            raise DeployRefused(f"{model}@{name}: there is no such revision", "revision")
        return found

    async def prepare(self, model: str, revision: str) -> Artifact:
        await wait(self.takes_s)
        self.prepared.append(revision)
        if revision in self.broken:
            raise DeployRefused(self.broken[revision], "revision")
        return artifact(self.names[revision])


@dataclass
class World:
    """The facts, and the faults."""

    folder: Path
    store: Store
    replicas: int = 3
    declared: str = "old"
    requests_per_s: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    """Share of failed requests, by revision."""
    slowness: dict[str, float] = field(default_factory=dict)
    """How many times as long a revision takes."""
    never_ready: set[str] = field(default_factory=set)
    engine_restarts: dict[str, int] = field(default_factory=dict)
    """By slot."""
    samples: list[Sample] = field(default_factory=list)
    journal: list[JournalEvent] = field(default_factory=list)
    acted: Callable[[], None] = lambda: None
    """Called after each action of control."""

    def __post_init__(self) -> None:
        self.shelf = FakeRevisions()
        self.provider = WatchedProvider(self)
        self.specs: dict[UnitKey, WorkerSpec] = {}
        self.born: dict[UnitKey, float] = {}
        self.sent_until = wall_s()
        self.rng = Random(7)

    @property
    def places(self) -> Places:
        return Places(self.folder)

    def plan(self, **settings: object) -> Plan:
        """As a cluster file would have it."""
        model = {"name": "chat", "task": "chat", "source": "synthetic", "engine": "synthetic"}
        models = [{**model, "replicas": self.replicas, **settings}]
        gateway = {"port": 8080, "records": {}}
        cluster = Cluster.model_validate({"models": models, "gateway": gateway})
        return make_plan(cluster, {"chat": artifact(self.declared)}, self.places, "0")

    def snapshot(self) -> Snapshot:
        return msgspec.json.decode(self.places.snapshot.read_bytes(), type=Snapshot)

    @property
    def routes(self) -> ModelRoutes:
        return next(model for model in self.snapshot().models if model.name == "chat")

    def ready(self, name: str) -> int:
        """Of a revision, as gateways know it."""
        return sum(r.revision == name and r.state is READY for r in self.routes.replicas)

    def generation(self, slot: str) -> int:
        return max(unit.generation for unit in self.provider.alive() if unit.slot == slot)

    def alive(self) -> dict[str, str]:
        """Revisions by slot."""
        units = self.provider.alive()
        return {unit.slot: self.specs[unit.key].revision for unit in units if unit.kind is Kind.REPLICA}

    def send(self) -> None:
        """Requests since the last look, divided as the snapshot says; each ends with a sample."""
        since, self.sent_until = self.sent_until, wall_s()
        routes = self.routes if self.places.snapshot.exists() else None
        split = routes.split if routes else None
        if routes is None or split is None:
            return
        ready = any(r.revision == split.canary and r.state is READY for r in routes.replicas)
        several = int((self.sent_until - since) * self.requests_per_s)
        for number in range(several):
            canary = self.rng.random() < split.share and ready
            arm, name = (Arm.CANARY, split.canary) if canary else (Arm.STABLE, split.stable)
            code = "engine_failed" if self.rng.random() < self.errors.get(name, 0.0) else OK
            took = self.rng.lognormvariate(0.0, 0.3) * self.slowness.get(name, 1.0)
            at = since + number / self.requests_per_s
            early = at - took < split.counts_from
            times = (took * 0.2, took * 0.01, took)
            self.samples.append(Sample(split.rollout, arm, at, code, "256", *times, 100, False, False, early))


class WatchedProvider(MemoryProvider):
    """Knows what its units are, and tells of every action."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.placed: Counter[str] = Counter()
        """Starts, by slot."""

    async def place(self, slot: Slot, generation: int) -> None:
        await super().place(slot, generation)
        key = slot.id, generation
        if isinstance(slot.spec, WorkerSpec):
            assert all(unit.slot != slot.id for unit in self.alive() if unit.key != key), "two units in a slot"
            self._world.specs[key] = slot.spec
        self.placed[slot.id] += 1
        self._world.born[key] = asyncio.get_running_loop().time()
        self._world.acted()

    async def remove(self, slot: str, generation: int, grace_s: float) -> None:
        await super().remove(slot, generation, grace_s)
        self._world.acted()

    def alive(self) -> list[ObservedUnit]:
        return [unit for _, unit in sorted(self._units.items()) if unit.alive]


class WorldProber(Prober):
    """Asks the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def ask(self, units: Iterable[ObservedUnit]) -> dict[UnitKey, Answer]:
        return {unit.key: self._answer(unit) for unit in units if unit.alive and unit.endpoint}

    def _answer(self, unit: ObservedUnit) -> Answer:
        if unit.kind is Kind.GATEWAY:
            return Answered()
        world, spec = self._world, self._world.specs[unit.key]
        age_s = asyncio.get_running_loop().time() - world.born[unit.key]
        ready = age_s >= START_S and spec.revision not in world.never_ready
        state = READY if ready else ReplicaState.WARMING
        restarts = world.engine_restarts.get(unit.slot, 0)
        return Answered(
            LoadReport(unit.slot, unit.generation, "chat", spec.revision, state, engine_restarts=restarts)
        )

    async def demands(self, units: Iterable[ObservedUnit]) -> dict[str, Demand]:
        return {}

    async def pages(self, units: Iterable[ObservedUnit]) -> dict[str, bytes]:
        line = f'forebay_requests_total{{model="chat",code="ok"}} {int(wall_s() * self._world.requests_per_s)}'
        return {"gateway-0": line.encode()}

    async def observations(
        self, units: Iterable[ObservedUnit], cursors: Mapping[str, tuple[str, int]]
    ) -> dict[str, Observed]:
        self._world.send()
        _, after = cursors.get("gateway-0", ("", 0))
        page = tuple(self._world.samples[after : after + 1000])
        return {"gateway-0": Observed("g", after + len(page), page)}


class FaultyStore(Store):
    """A store that can be down, and whose answer can get lost after a write that it keeps."""

    def __init__(self, store: Store) -> None:
        super().__init__(store._engine, store.name)
        self.down = ""
        self.loses_answer = False
        self.written: Callable[[], None] = lambda: None
        """Called after each write that is kept."""

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self._check()
        with super().write() as connection:
            yield connection
        self.written()
        if self.loses_answer:
            self.loses_answer = False
            raise StoreDown("the server closed the connection")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self._check()
        with super().read() as connection:
            yield connection

    def _check(self) -> None:
        if self.down:
            raise StoreDown(self.down)
