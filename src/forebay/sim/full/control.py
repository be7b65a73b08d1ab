"""The product's control, which can be killed and comes back; and the snapshot file that gateways read."""

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec

from forebay.control.journal import Journal
from forebay.control.loop import Controller
from forebay.control.plan import Artifact, Places, Plan, make_plan
from forebay.control.probe import BODY_BYTES_MAX, Prober
from forebay.control.snapshot import SnapshotFile
from forebay.core.cluster import Cluster
from forebay.core.model import Dispatch, GatewaySpec, ModelRoutes, ReplicaState, Snapshot
from forebay.core.reconcile import Kind, Rules, Slot
from forebay.obs.metrics import Metrics
from forebay.sim.full.book import Book
from forebay.sim.full.clients import MODEL
from forebay.sim.full.machine import Machine, MachineProvider
from forebay.sim.full.profile import Profile
from forebay.sim.network.network import Network
from forebay.wire.documents import UNREADABLE

GATEWAY_PORT: Final = 8080
RULES: Final = Rules(unresponsive_s=4.0, stable_s=20.0, backoff_max_s=4.0)
SNAPSHOTS_MAX: Final = 100
KNOWN_AFTER_S: Final = 0.5
"""Gateways look at the snapshot file several times in this time."""
LENGTH: Final = re.compile(rb"\r\ncontent-length: ([0-9]+)")
GRACE_S: Final = 4.0


class Snapshots(SnapshotFile):
    """Stamps the file with a time that grows by each write: those of the file system depend on the real clock."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path
        self.all: list[bytes] = []
        self._stamps = 0
        self._changed_at = 0.0

    def write(self, models: tuple[ModelRoutes, ...], dispatch: Dispatch | None = None) -> bool:
        """Replace the snapshot, unless it says the same."""
        written = super().write(models, dispatch)
        if written:
            self.all = [*self.all[-SNAPSHOTS_MAX:], self.path.read_bytes()]
            self.stamp()
            self._left = self._stamp()
        return written

    def change(self, data: bytes) -> None:
        """Somebody else writes it."""
        draft = self.path.with_suffix(".other")
        draft.write_bytes(data)
        draft.replace(self.path)
        self.stamp()

    @property
    def told(self) -> Snapshot | None:
        """What the file has said for long enough that everybody must know it; None: nothing yet, or nothing clear."""
        if asyncio.get_running_loop().time() - self._changed_at < KNOWN_AFTER_S:
            return None
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Snapshot)
        except (OSError, *UNREADABLE):
            return None

    def stamp(self) -> None:
        """The file is another one from now on."""
        self._changed_at = asyncio.get_running_loop().time()
        self._stamps += 1
        os.utime(self.path, ns=(self._stamps, self._stamps))


class LightProber(Prober):
    """The product's prober on simulated connections; the client that it has elsewhere wants real sockets."""

    async def _get(self, url: str) -> bytes:
        parts = urlsplit(url)
        request = b"GET %b HTTP/1.1\r\nhost: sim\r\nconnection: close\r\n\r\n" % parts.path.encode()
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(request)
                answer = await reader.read(BODY_BYTES_MAX)
                while more := await reader.read(BODY_BYTES_MAX):
                    answer += more
            finally:
                writer.transport.abort()
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        head, _, body = answer.partition(b"\r\n\r\n")
        found = LENGTH.search(head.lower())
        if not head.startswith(b"HTTP/1.1 200 ") or found is None or len(body) != int(found[1]):
            raise httpx.RemoteProtocolError(f"no whole answer: {head[:40]!r}")
        return body


class Control:
    """Control of one cluster, one process after the other."""

    def __init__(
        self,
        profile: Profile,
        *,
        network: Network,
        machine: Machine,
        group: asyncio.TaskGroup,
        folder: Path,
        book: Book,
    ) -> None:
        self._network = network
        self._machine = machine
        self._group = group
        self._book = book
        self._places = Places(folder)
        self._generation = 0
        self._versions = {Kind.REPLICA: 0, Kind.GATEWAY: 0}
        self._plan = _plan(profile, self._places)
        self.snapshots = Snapshots(self._places.snapshot)
        self._journal: Journal | None = None
        self._task: asyncio.Task[None] | None = None
        self.controller: Controller | None = None

    @property
    def node(self) -> str:
        """Of the process that runs, or ran last."""
        return f"control.{self._generation}"

    @property
    def plan(self) -> Plan:
        """What is wanted."""
        return self._plan

    def start(self) -> None:
        """Begin, or begin again."""
        self._generation += 1
        self._book.note("control", self._generation)
        with self._network.node(self.node):
            self._task = self._group.create_task(self._run())

    def kill(self) -> None:
        """Nothing more is done, and nothing is said; units run on."""
        if self._task is not None:
            self._book.note("control dies", self._generation)
            self._network.kill(self.node)
            self._task.cancel()
            self._task = self.controller = None

    def upgrade(self, kind: Kind) -> None:
        """Every unit of a kind is to be replaced."""
        self._versions[kind] += 1
        plan, version = self._plan, str(self._versions[kind])
        self._book.note("upgrade", kind, version)
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
        provider, prober = MachineProvider(self._machine, self._book), LightProber(self._places.peers)
        journal = Journal(self._places.log, lambda event: self._book.note("journal", event.unit, event.state))
        self.controller = controller = Controller(
            self._plan, provider, prober, snapshot=self.snapshots, journal=journal, metrics=Metrics(), rules=RULES
        )
        self._journal = journal
        try:
            await controller.run()
        finally:
            provider.close()
            journal.close()
            await prober.close()

    def check(self) -> None:
        """What must hold whenever control does nothing."""
        controller, journal = self.controller, self._journal
        for slot in {process.slot.id for process in self._machine.alive if process.slot.kind is Kind.REPLICA}:
            alive = [x.node for x in self._machine.alive if x.slot.id == slot]
            self._book.expect(len(alive) <= 1, "one unit in a slot", " ".join(alive))
        if controller is None or journal is None:
            return
        told = {event.unit: event.state for event in journal.events if event.unit}
        for slot_state in controller.state.slots:
            last = told.get(slot_state.id, ReplicaState.STOPPED.value)
            self._book.expect(
                last == slot_state.state.value, "the journal tells the state", f"{slot_state.id}: {last}"
            )

    @property
    def settled(self) -> bool:
        """Whether all is as it is wanted."""
        controller = self.controller
        if controller is None or controller.trouble:
            return False
        wanted = {slot.id for slot in self._plan.slots}
        states = controller.state.slots
        digests = {slot.id: slot.digest for slot in self._plan.slots}
        return (
            {s.id for s in states} == wanted == {x.slot.id for x in self._machine.alive}
            and all(s.state is ReplicaState.READY and not s.leaving for s in states)
            and all(x.slot.digest == digests[x.slot.id] and not x.asked for x in self._machine.alive)
        )


def _changed(slot: Slot, version: str) -> Slot:
    return replace(slot, digest=f"{slot.digest.partition('+')[0]}+{version}")


def _plan(profile: Profile, places: Places) -> Plan:
    settings: dict[str, int | float | str | bool] = {
        "concurrency": profile.concurrency,
        "prefill_tokens_per_s": profile.prefill_tokens_per_s,
        "step_ms": profile.step_ms,
        "kv_cache_tokens": 8192,
    }
    cluster = Cluster.model_validate(
        {
            "gateway": {"processes": profile.gateways, "port": GATEWAY_PORT, "drain_grace_s": GRACE_S},
            "models": [
                {
                    "name": MODEL,
                    "task": "chat",
                    "source": "synthetic",
                    "engine": {"name": "synthetic", **settings},
                    "replicas": profile.replicas,
                    "routing": profile.policy,
                    "queue_max": profile.queue_max,
                    "queue_timeout_s": profile.queue_timeout_s,
                    "engine_hang_s": 3.0,
                    "drain_grace_s": GRACE_S,
                }
            ],
        }
    )
    plan = make_plan(cluster, {MODEL: Artifact(Path("synthetic"), "synthetic", "synthetic", settings)}, places, "0")
    return replace(plan, gateways=tuple(_without_records(slot) for slot in plan.gateways))


def _without_records(slot: Slot) -> Slot:
    """Records are files of their own, and are tested for themselves."""
    assert isinstance(slot.spec, GatewaySpec)
    return replace(slot, spec=replace(slot.spec, records=None))
