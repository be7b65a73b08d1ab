"""Control over a world on virtual time: started, killed, started again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.control.deploying.world import FaultyStore, World, WorldProber

from forebay.control.deploying import Deployments, RolloutRequest, RolloutStanding
from forebay.control.journal import Journal
from forebay.control.loop import Controller
from forebay.control.plan import Plan
from forebay.control.rolling.recalling import Recall
from forebay.control.snapshot import SnapshotFile
from forebay.control.standby.standby import Standby
from forebay.core.deploy.course import Course, Kind
from forebay.core.deploy.rollout import Phase, Rollout
from forebay.core.reconcile import Rules
from forebay.core.rollout.planning import Step
from forebay.obs.metrics import Metrics
from forebay.sim.loop import run
from forebay.store.database import StoreError, open_store
from forebay.store.rollouts import Rollouts

T = TypeVar("T")
RULES = Rules(unresponsive_s=4.0, stable_s=20.0, backoff_max_s=4.0)
QUICK = Course(Kind.CANARY, (Step(0.2, 120.0), Step(0.5, 120.0)), start_timeout_s=60.0, warm_up_s=2.0, settle_s=10.0)
SWIFT = Course(Kind.BLUE_GREEN, (), start_timeout_s=60.0, warm_up_s=1.0, settle_s=4.0)
WAIT_S = 3600.0


async def inline(work: Callable[[], T]) -> T:
    return work()


@dataclass
class Rig:
    """A control that runs."""

    world: World
    control: Controller
    deployments: Deployments
    journal: Journal
    task: asyncio.Task[None]
    metrics: Metrics = field(default_factory=Metrics)

    async def kill(self) -> None:
        """Nothing more is done; units run on."""
        self.task.cancel()
        await asyncio.wait([self.task])
        self.journal.close()

    async def until(self, holds: Callable[[], object], within_s: float = WAIT_S) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not holds():
                    assert not self.task.done(), self.task
                    await asyncio.sleep(0.1)
        except TimeoutError:
            told = [f"{e.at % 1e5:.1f} {e.kind} {e.unit} {e.why}" for e in self.world.journal]
            raise AssertionError("\n".join(["never came true", *told, str(self.deployments.standing())])) from None

    async def ready(self) -> None:
        await self.until(lambda: self.world.places.snapshot.exists() and self.complete())

    def complete(self) -> bool:
        models = self.world.snapshot().models
        return bool(models) and sum(r.state == "ready" for r in models[0].replicas) >= self.world.replicas

    async def deploy(self, name: str = "new", course: Course = QUICK, actor: str = "ann") -> RolloutStanding:
        return await self.deployments.deploy(RolloutRequest("chat", name, course), actor)

    @property
    def rollout(self) -> Rollout:
        """As it is known; cheaper than its standing."""
        return self.deployments._ledger.rows["chat"].rollout

    @property
    def standing(self) -> RolloutStanding:
        [found] = self.deployments.standing("chat")
        return found

    async def reaches(self, phase: Phase, within_s: float = WAIT_S) -> None:
        await self.until(lambda: self.rollout.phase is phase, within_s)

    @property
    def kinds(self) -> list[str]:
        """What has happened, of deployments."""
        kinds = [event.kind for event in self.world.journal]
        return [kind for kind in kinds if kind.startswith(("rollout.", "target."))]


@asynccontextmanager
async def controlled(world: World, plan: Plan | None = None) -> AsyncIterator[Rig]:
    """At the end control is cut off, as if it were killed: units run on."""
    rig = await started(world, plan)
    try:
        yield rig
    finally:
        await rig.kill()


async def started(world: World, plan: Plan | None = None) -> Rig:
    """A control that runs until it is killed."""
    journal = Journal(world.places.log, world.journal.append)
    plan = plan or world.plan()
    records = Rollouts(lambda: world.store, "test")
    recall = Recall(world.places.deployed)
    deployments = Deployments(records, world.shelf, inline, note=journal.note, recall=recall)
    try:
        await deployments.begin(plan)
    except StoreError:
        journal.close()
        raise
    metrics = Metrics()
    control = Controller(
        plan,
        world.provider,
        WorldProber(world),
        snapshot=SnapshotFile(world.places.snapshot),
        journal=journal,
        metrics=metrics,
        rules=RULES,
        deployments=deployments,
        standby=Standby(metrics, journal.note),
    )
    task = asyncio.get_running_loop().create_task(control.run())
    return Rig(world, control, deployments, journal, task, metrics)


def play(folder: Path, test: Callable[[World], Awaitable[None]]) -> None:
    """On virtual time, with a store in a file."""
    store = FaultyStore(open_store(f"sqlite:///{folder / 'store.db'}"))

    async def played() -> None:
        await test(World(folder, store))

    try:
        run(played(), seconds_max=100_000.0)
    finally:
        store.close()
