"""Rollouts in a simulated cluster: a store, revisions, an operator, and invariants."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar

from forebay.control.deploying import Deployments, DeployRefused, RolloutStanding
from forebay.control.plan import Artifact
from forebay.core.deploy.rollout import ENDED
from forebay.core.model import ModelRoutes
from forebay.core.revision import revision_id
from forebay.sim.full.clients import MODEL
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.replica import SOUND, Nature
from forebay.sim.full.rollouts.drawing import NATURES
from forebay.sim.full.rollouts.faults import Undo
from forebay.sim.full.rollouts.operator import Operator
from forebay.sim.full.rollouts.rules import check_agreement, check_published, check_stopped, note_shares, wanted
from forebay.sim.full.rollouts.store import ShakyStore, open_quick
from forebay.store.database import Store, StoreDown, StoreError
from forebay.store.events import Event, since
from forebay.store.rollouts import Rollouts

T = TypeVar("T")


class Control(Protocol):
    """The process that performs rollouts."""

    deployments: Deployments | None
    """None while it is down."""

    def kill(self) -> None:
        """Kill it."""

    def start(self) -> None:
        """Restart it."""


async def inline(work: Callable[[], T]) -> T:
    """Run synchronously what the product runs in a thread."""
    return work()


class _Trap:
    """Makes control die after an action; `sprung` once it has."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.sprung = False


class RolloutScenario:
    """The rollouts of one cluster. `declared` is the artifact of its file, with `replicas` replicas."""

    def __init__(
        self,
        rollouts: tuple[str, ...],
        rng: Random,
        *,
        cluster: str,
        declared: Artifact,
        replicas: int,
        whole: bool,
        folder: Path,
        event_log: EventLog,
        control: Control,
        group: asyncio.TaskGroup,
    ) -> None:
        self._artifacts = _artifacts(declared, len(rollouts))
        self.declared = revision_id(declared.digest, declared.engine, declared.settings)
        self.replicas = replicas
        self.whole = whole
        self.surest: dict[str, float] = {}
        self.event_log = event_log
        self.download_s = 0.0
        self.download_breaks = ""
        self.operator = Operator(dict(zip(self._artifacts, rollouts, strict=True)), rng, self, event_log)
        self._url = f"sqlite:///{folder / 'store.db'}"
        self._cluster = cluster
        self._control = control
        self._group = group
        self._sound: Store = open_quick(self._url)
        self.store = ShakyStore(self._sound, self._written)
        self.truth = Rollouts(lambda: self._sound, cluster)
        """The stored state, whatever control knows of it."""
        self._traps: list[_Trap] = []
        self._ending = False
        self._calls: dict[asyncio.Task[RolloutStanding | None], None] = {}
        self._task: asyncio.Task[None] | None = None

    # --- for control

    def deployments(self) -> Deployments:
        """The deployments of a starting control."""
        return Deployments(Rollouts(self._open, self._cluster), self, inline, note=self._note)

    def find(self, model: str, name: str) -> str:
        """The revision of that name."""
        if name not in self._artifacts:
            raise DeployRefused(f"{model} has no revision {name}", "revision")
        return name

    async def prepare(self, model: str, revision: str) -> Artifact:
        """Download a revision."""
        await asyncio.sleep(self.download_s)
        if self.download_breaks:
            raise DeployRefused(self.download_breaks, "revision")
        return self._artifacts[revision]

    def _open(self) -> Store:
        if self.store.down:
            raise StoreDown(f"{self.store.name}: connection refused")
        return self.store

    def _note(self, kind: str, text: str) -> None:
        self.event_log.note("deployments", kind, text)

    # --- for faults

    def set_trap(self, where: str) -> Undo:
        """Make control die right after its next action of this kind."""
        trap = _Trap(where)
        self._traps.append(trap)

        def undo() -> None:
            self._traps.remove(trap)
            if trap.sprung:
                self._control.start()

        return undo

    def done(self, what: str) -> None:
        """Control has just acted; this may be its last action."""
        trap = next((each for each in self._traps if each.where == what and not each.sprung), None)
        if trap is not None and self._control.deployments is not None:
            trap.sprung = True
            self._control.kill()
            raise asyncio.CancelledError

    def _written(self) -> None:
        note_shares(self)
        self.done("write")

    def heal(self) -> None:
        """End all faults; no new rollout starts."""
        self.operator.hurried = True
        self.store.conflicts = self.store.answers_lost = 0

    def end(self) -> None:
        """The cluster is about to be stopped."""
        self._ending = True

    def close(self) -> None:
        """Close the store."""
        self._sound.close()

    # --- for who deploys

    def begin(self) -> None:
        """Start the rollouts."""
        self._task = self._group.create_task(self.operator.run())

    async def ask(
        self, what: Callable[[Deployments], Coroutine[None, None, RolloutStanding]]
    ) -> RolloutStanding | None:
        """Call control; None if it is down, dies meanwhile, or refuses."""
        deployments = self._control.deployments
        if deployments is None:
            return None
        call = self._group.create_task(self._call(what(deployments)))
        self._calls[call] = None
        call.add_done_callback(self._calls.pop)
        await asyncio.wait([call])
        return None if call.cancelled() else call.result()

    async def _call(self, call: Awaitable[RolloutStanding]) -> RolloutStanding | None:
        try:
            return await call
        except (DeployRefused, StoreError) as refused:
            self.event_log.note("refused", refused)
            return None

    def hang_up(self) -> None:
        """Control died, and with it all pending calls."""
        for call in list(self._calls):
            call.cancel()

    def standing(self, id: str) -> RolloutStanding | None:
        """The state of a rollout, as reported by control."""
        return next((each for each in self._standings if each.rollout.id == id), None)

    def latest(self) -> RolloutStanding | None:
        """The state of the running rollout."""
        return next((each for each in self._standings if each.rollout.phase not in ENDED), None)

    @property
    def _standings(self) -> tuple[RolloutStanding, ...]:
        deployments = self._control.deployments
        return () if deployments is None else deployments.standing(MODEL)

    # --- rules

    def nature(self, revision: str) -> Nature:
        """The faults of a revision."""
        return NATURES[self.operator.natures[revision]] if revision in self.operator.natures else SOUND

    @property
    def over(self) -> bool:
        """Whether all rollouts have ended."""
        return self._task is None or self._task.done()

    @property
    def wanted(self) -> dict[str, str]:
        """Revisions by slot, as stored."""
        return wanted(self.truth.known(), self.declared, self.replicas)

    def published(self, models: tuple[ModelRoutes, ...]) -> None:
        """A snapshot was written."""
        if self._task is not None and not self._ending:
            check_published(models, self)
        self.done("publish")

    def check_agreement(self) -> None:
        """Check the final state."""
        check_agreement(self._standings, self)

    def events(self) -> list[Event]:
        """The event log."""
        with self._sound.read() as connection:
            return list(since(connection))

    def stopped(self, slot: str, revision: str) -> None:
        """Control asks a healthy unit to stop."""
        check_stopped(slot, revision, self)


def _artifacts(declared: Artifact, several: int) -> Mapping[str, Artifact]:
    """Revisions with equal responses, by id."""
    made = [
        Artifact(declared.path, f"weights-{number}", declared.engine, declared.settings) for number in range(several)
    ]
    return {revision_id(each.digest, each.engine, each.settings): each for each in made}
