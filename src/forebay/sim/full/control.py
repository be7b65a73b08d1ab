"""The product's control, which can be killed and restarted; and the snapshot file that gateways read."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from forebay.control.deploying import Deployments, DeployRefused
from forebay.control.journal import Journal
from forebay.control.leading.term import Term
from forebay.control.loop import Controller
from forebay.control.plan import Artifact, Places, Plan, make_plan
from forebay.control.probe import Prober
from forebay.control.scaling.scaler import Scaler
from forebay.control.snapshot import SnapshotFile
from forebay.control.standby.standby import Standby
from forebay.core.cluster import Cluster
from forebay.core.model import Dispatch, GatewaySpec, ModelRoutes, ReplicaState, Snapshot, WorkerSpec
from forebay.core.reconcile import Kind, Rules, Slot
from forebay.core.tenancy import Tenant
from forebay.obs.metrics import Metrics
from forebay.sim.full.clients import MODEL
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.leading.leadership import ControllerLeadership, FencedProvider
from forebay.sim.full.machine import Machine, MachineProvider, Process
from forebay.sim.full.profile import Profile
from forebay.sim.full.rollouts.scenario import RolloutScenario, inline
from forebay.sim.network.network import Network
from forebay.store.database import Store, StoreError
from forebay.store.documents import Documents
from forebay.store.schema import SCALES
from forebay.wire.documents import UNREADABLE

CLUSTER: Final = "forebay"
GATEWAY_PORT: Final = 8080
RULES: Final = Rules(unresponsive_s=4.0, stable_s=20.0, backoff_max_s=4.0)
SNAPSHOTS_MAX: Final = 100
KNOWN_AFTER_S: Final = 0.5
"""Gateways read the snapshot file several times within this time."""
GRACE_S: Final = 4.0
DOWN_S: Final = 2.0
"""Scale-down window."""
TRY_AGAIN_S: Final = 0.5
"""Delay before a control that failed to start is restarted."""


class SharedSnapshot:
    """The snapshot file, whichever process writes it.

    Its timestamps grow with each write, as those of the file system depend on the real clock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[bytes] = []
        """What was written, newest last."""
        self._stamps = 0
        self._changed_at = 0.0

    def written(self) -> None:
        """Control has replaced it."""
        self.all = [*self.all[-SNAPSHOTS_MAX:], self.path.read_bytes()]
        self.stamp()

    def change(self, data: bytes) -> None:
        """Another process overwrites it."""
        draft = self.path.with_suffix(".other")
        draft.write_bytes(data)
        draft.replace(self.path)
        self.stamp()

    @property
    def propagated(self) -> Snapshot | None:
        """The content that every gateway must know by now; None: not old enough, or unreadable."""
        if asyncio.get_running_loop().time() - self._changed_at < KNOWN_AFTER_S:
            return None
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Snapshot)
        except (OSError, *UNREADABLE):
            return None

    def stamp(self) -> None:
        """Mark the file as changed."""
        self._changed_at = asyncio.get_running_loop().time()
        self._stamps += 1
        os.utime(self.path, ns=(self._stamps, self._stamps))


class Snapshots(SnapshotFile):
    """The snapshots written by one control."""

    def __init__(self, shared_snapshot: SharedSnapshot, epoch: int = 0) -> None:
        super().__init__(shared_snapshot.path, epoch)
        self.heard: Callable[[tuple[ModelRoutes, ...]], None] = lambda models: None
        """Called with what was written."""
        self._shared_snapshot = shared_snapshot

    def write(
        self,
        models: tuple[ModelRoutes, ...],
        dispatch: Dispatch | None = None,
        tenants: tuple[Tenant, ...] | None = None,
    ) -> bool:
        """Replace the snapshot, unless it is unchanged."""
        written = super().write(models, dispatch, tenants)
        if written:
            self._shared_snapshot.written()
            self._left = self._stamp()
            self.heard(models)
        return written


class Control:
    """Control of one cluster, one process after the other; with a `leadership`, one of several.

    `store` is where scaling state is kept; None: there is none.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        network: Network,
        machine: Machine,
        group: asyncio.TaskGroup,
        folder: Path,
        event_log: EventLog,
        shared_snapshot: SharedSnapshot | None = None,
        store: Store | None = None,
        name: str = "control",
        leadership: ControllerLeadership | None = None,
    ) -> None:
        self.leadership = leadership
        self.name = name
        self._scales = bool(profile.scaling)
        self._store = store
        self._network = network
        self._machine = machine
        self._group = group
        self._event_log = event_log
        self._places = Places(folder)
        self._generation = 0
        self._versions = {Kind.REPLICA: 0, Kind.GATEWAY: 0}
        self._artifact = artifact(profile)
        self._plan = _plan(profile, self._artifact, self._places)
        self.shared_snapshot = shared_snapshot or SharedSnapshot(self._places.snapshot)
        self.snapshots = Snapshots(self.shared_snapshot)
        self._journal: Journal | None = None
        self._gone: dict[str, int] = {}
        """By unit, its last event before its slot was removed: a slot desired again starts over."""
        self._task: asyncio.Task[None] | None = None
        self.controller: Controller | None = None
        self.deployments: Deployments | None = None
        self.scenario: RolloutScenario | None = None
        """The source of rollouts; None: there are none."""

    @property
    def node(self) -> str:
        """The node of the current or last process."""
        return f"{self.name}.{self._generation}"

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._task is not None and not self._task.done()

    @property
    def plan(self) -> Plan:
        """The desired state."""
        return self._plan

    def start(self) -> None:
        """Start or restart it."""
        self._generation += 1
        self._event_log.note(self.name, self._generation)
        with self._network.node(self.node):
            self._task = self._group.create_task(self._run())

    def kill(self) -> None:
        """Kill it; units keep running."""
        if self._task is not None:
            self._event_log.note(f"{self.name} dies", self._generation)
            self._network.kill(self.node)
            self._task.cancel()
            self._task = self.controller = self.deployments = None
            if self.scenario is not None:
                self.scenario.hang_up()

    end = kill

    def retire(self) -> None:
        """No effect: there is no other control."""

    epoch = 0

    def check_leader(self, epoch: int) -> None:
        """No effect: there is no other control that could lead."""

    def freeze(self) -> None:
        """Stop its process until it is thawed."""
        if self.alive:
            self._event_log.note("stopped", self.node)
            self._network.freeze(self.node)

    def thaw(self) -> None:
        """Continue its process."""
        self._network.thaw(self.node)

    def upgrade(self, kind: Kind) -> None:
        """Require replacement of every unit of a kind."""
        self._versions[kind] += 1
        plan, version = self._plan, str(self._versions[kind])
        self._event_log.note("upgrade", kind, version)
        if kind is Kind.GATEWAY:
            self._plan = replace(plan, gateways=tuple(_changed(slot, version) for slot in plan.gateways))
        else:
            [model] = plan.models
            assert model.spare is not None
            slots = tuple(_changed(slot, version) for slot in model.slots)
            self._plan = replace(plan, models=(replace(model, slots=slots, spare=_changed(model.spare, version)),))
        if self.controller is not None:
            self.controller.take_over(self._plan, None)

    async def _run(self) -> None:
        leadership = self.leadership
        if leadership is None:
            await self._work(None)
            return
        candidate = leadership.candidate(self.node, lambda kind, why: self._event_log.note(kind, self.node))
        while self.controller is None or not self.controller.is_over:
            term = await candidate.elected(inline)
            leadership.begin_term(term, self.node)
            await self._lead(term)
        await candidate.resign(inline)

    async def _lead(self, term: Term) -> None:
        """Lead until the term is over or the cluster is stopped."""
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(term.keep(inline))
            working = tasks.create_task(self._work(term))
            await asyncio.wait((keeping, working), return_when=asyncio.FIRST_COMPLETED)
            keeping.cancel()
            working.cancel()
        if self.controller is not None and not self.controller.is_over:
            self.controller = None
            self._event_log.note("deposed", self.node)

    def _provider(self, term: Term | None) -> MachineProvider:
        if term is None or self.leadership is None:
            return MachineProvider(self._machine, self._event_log, None if self.scenario is None else self)
        leader_check, epoch = self.leadership.leader_check, term.epoch
        self.snapshots = Snapshots(self.shared_snapshot, epoch)
        self.snapshots.heard = lambda models: leader_check.check_action(epoch, "a snapshot")
        return FencedProvider(self._machine, self._event_log, term.fence, self.leadership)

    def _scaler(self, term: Term | None, journal: Journal, metrics: Metrics) -> Scaler | None:
        store = self._store
        if not self._scales or store is None:
            return None
        if term is not None and self.leadership is not None:
            store = self.leadership.guarded(term)
        return Scaler(
            Documents(SCALES, lambda: store, self._plan.cluster), inline, note=journal.note, metrics=metrics
        )

    async def _work(self, term: Term | None) -> None:
        scenario = self.scenario
        provider = self._provider(term)
        prober = Prober(self._places.peers)
        path = self._places.log.with_name(f"{self.name}.log")
        journal = Journal(path, lambda event: self._event_log.note("journal", event.unit, event.state))
        deployments = None if scenario is None else scenario.deployments()
        metrics = Metrics()
        self.controller = controller = Controller(
            self._plan,
            provider,
            prober,
            snapshot=self.snapshots,
            journal=journal,
            metrics=metrics,
            rules=RULES,
            deployments=deployments,
            scaler=self._scaler(term, journal, metrics),
            leading=term,
            standby=Standby(metrics, journal.note),
        )
        self._journal, self._gone = journal, {}
        try:
            if deployments is not None:
                await self._take_up(deployments)
                self.deployments = deployments
            await controller.run()
        finally:
            provider.close()
            journal.close()

    async def _take_up(self, deployments: Deployments) -> None:
        """Load the stored state, retrying until it succeeds."""
        while True:
            try:
                await deployments.begin(self._plan)
            except (StoreError, DeployRefused) as error:
                self._event_log.note("control waits", error)
                await asyncio.sleep(TRY_AGAIN_S)
            else:
                return

    def check(self) -> None:
        """Check the invariants that hold whenever control is idle."""
        controller, journal = self.controller, self._journal
        for slot in {process.slot.id for process in self._machine.alive if process.slot.kind is Kind.REPLICA}:
            alive = [x.node for x in self._machine.alive if x.slot.id == slot]
            self._event_log.expect(len(alive) <= 1, "at most one unit per slot", " ".join(alive))
        if controller is None or journal is None:
            return
        told = {event.unit: event for event in journal.events if event.unit}
        slots = {slot_state.id for slot_state in controller.state.slots}
        self._gone |= {unit: event.number for unit, event in told.items() if unit not in slots}
        for slot_state in controller.state.slots:
            event = told.get(slot_state.id)
            tells = event is not None and event.number > self._gone.get(slot_state.id, 0)
            last = event.state if event is not None and tells else ReplicaState.STOPPED.value
            self._event_log.expect(
                last == slot_state.state.value, "the journal agrees with the state", f"{slot_state.id}: {last}"
            )

    @property
    def settled(self) -> bool:
        """Whether the desired state is reached."""
        controller = self.controller
        if controller is None or controller.trouble:
            return False
        plan = controller.plan if self.scenario is not None or self._scales else self._plan
        wanted = {slot.id for slot in plan.slots}
        states = controller.state.slots
        digests = {slot.id: slot.digest for slot in plan.slots}
        return (
            {s.id for s in states} == wanted == {x.slot.id for x in self._machine.alive}
            and all(s.state is ReplicaState.READY and not s.leaving for s in states)
            and all(x.slot.digest == digests[x.slot.id] and not x.asked for x in self._machine.alive)
            and (self.scenario is None or (self.scenario.over and self._revisions == self.scenario.wanted))
        )

    @property
    def _revisions(self) -> dict[str, str]:
        """Revisions of the running replicas."""
        specs = [process.spec for process in self._machine.alive]
        return {spec.replica: spec.revision for spec in specs if isinstance(spec, WorkerSpec)}

    # --- for the provider

    def asks(self, process: Process) -> None:
        """Control is about to ask a unit to stop."""
        spec, controller = process.spec, self.controller
        alone = sum(each.slot.id == process.slot.id for each in self._machine.alive) == 1
        if self.scenario and isinstance(spec, WorkerSpec) and controller and not controller.stopping and alone:
            self.scenario.stopped(spec.replica, spec.revision)

    def done(self, what: str) -> None:
        """Control has just started or stopped a unit."""
        if self.scenario is not None:
            self.scenario.done(what)


def _changed(slot: Slot, version: str) -> Slot:
    return replace(slot, digest=f"{slot.digest.partition('+')[0]}+{version}")


def artifact(profile: Profile) -> Artifact:
    """The artifact in the cluster file."""
    settings: dict[str, int | float | str | bool] = {
        "concurrency": profile.concurrency,
        "prefill_tokens_per_s": profile.prefill_tokens_per_s,
        "step_ms": profile.step_ms,
        "kv_cache_tokens": 8192,
    }
    return Artifact(Path("synthetic"), "synthetic", "synthetic", settings)


def _plan(profile: Profile, declared: Artifact, places: Places) -> Plan:
    cluster = Cluster.model_validate(
        {
            "name": CLUSTER,
            "gateway": {"processes": profile.gateways, "port": GATEWAY_PORT, "drain_grace_s": GRACE_S},
            "models": [
                {
                    "name": MODEL,
                    "task": "chat",
                    "source": "synthetic",
                    "engine": {"name": "synthetic", **declared.settings},
                    "replicas": profile.replicas,
                    **(_scaled(profile) if profile.scaling else {}),
                    "routing": profile.policy,
                    "queue_max": profile.queue_max,
                    "queue_timeout_s": profile.queue_timeout_s,
                    "engine_hang_s": 3.0,
                    "drain_grace_s": GRACE_S,
                }
            ],
        }
    )
    plan = make_plan(cluster, {MODEL: declared}, places, "0")
    return replace(plan, gateways=tuple(_without_records(slot) for slot in plan.gateways))


def _scaled(profile: Profile) -> dict[str, object]:
    return {
        "slo": {"ttft_p99_ms": 500.0, "tpot_p99_ms": 2 * profile.step_ms},
        "scale": {
            "max": profile.replicas_max,
            "policy": profile.scaling,
            "target": profile.concurrency / 2,
            "down": {"window_s": DOWN_S},
        },
    }


def _without_records(slot: Slot) -> Slot:
    """Records are separate files, which have their own tests."""
    assert isinstance(slot.spec, GatewaySpec)
    return replace(slot, spec=replace(slot.spec, records=None))
