"""A complete cluster on virtual time: built, used while faults occur, healed, used again, and stopped."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import structlog

from forebay.core.errors import OK
from forebay.core.model import GatewaySpec, Snapshot, WorkerSpec
from forebay.core.reconcile import Kind
from forebay.sim.full.clients import ClientRequest, Connection, Ending, judge, make_body, undisturbed
from forebay.sim.full.control import GATEWAY_PORT, KNOWN_AFTER_S, Control, artifact
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.faults import FAULTS, Undo
from forebay.sim.full.gateways import WatchedGateway, gate, wanted_by
from forebay.sim.full.leading.controller_group import ControllerGroup
from forebay.sim.full.leading.faults import FAULTS as OF_LEADERS
from forebay.sim.full.machine import Machine, Process
from forebay.sim.full.profile import Profile
from forebay.sim.full.replica import Health, work
from forebay.sim.full.rollouts.faults import FAULTS as OF_ROLLOUTS
from forebay.sim.full.rollouts.scenario import RolloutScenario
from forebay.sim.full.rollouts.store import open_quick
from forebay.sim.full.scaling.operator import ScalingOperator
from forebay.sim.loop import VirtualLoop
from forebay.sim.network.network import Network

CLIENTS: Final[tuple[str, ...]] = ("client-0", "client-1", "client-2")
HOST: Final = "127.0.0.1"
CHECK_EVERY_S: Final = 0.2
CONNECT_TIMEOUT_S: Final = 5.0
START_S_MAX: Final = 30.0
HEAL_S_MAX: Final = 90.0
"""Time after the last fault within which the cluster must recover."""
ROLLOUT_S_MAX: Final = 90.0
"""Time within which a started rollout must end."""
STOP_S_MAX: Final = 30.0
LOOK_S: Final = 0.25
FAULT_S: Final = (0.2, 6.0)
"""Range of the duration of a fault."""
PROBES: Final = 6
OWN_TASKS: Final = 1
PROBE_EVERY_S: Final = 0.6
"""After this time, gateways know that the last probe has ended."""
BURSTS_MAX: Final = 60
BURST_MAX: Final = 8
"""Bursts grow up to this many requests per slot, enough for a replica that counts as five times as loaded."""
CALLERS: Final = 12
"""Number of callers in seeds with rollouts, each assigned to an arm."""
OF_NETWORK: Final = frozenset({"slow-network", "partition", "reset", "host-lost"})
KNOWN_LATE_S: Final = 5.0
"""After a network fault it may take this long until disconnects are noticed everywhere."""
EXCUSED_S: Final = 3.0
"""Tolerance between a broken connection and the recorded fault."""


class World:
    """One run of one profile. `gateways` is filled as they start."""

    def __init__(
        self,
        profile: Profile,
        seed: int,
        *,
        network: Network,
        group: asyncio.TaskGroup,
        folder: Path,
        event_log: EventLog,
        gateways: list[WatchedGateway],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.profile = profile
        self.network = network
        self.event_log = event_log
        self.clients = CLIENTS
        self.machine = Machine(network, group, folder, event_log, self._main)
        self._store = open_quick(f"sqlite:///{folder / 'control.db'}") if profile.stores else None
        self.control = self._control(profile, group, folder)
        self.scaling_operator = self._scaling_operator(seed) if profile.scaling else None
        self.scenario = self._scenario(seed, group, folder) if profile.rollouts else None
        if self.scenario is not None:
            self.control.scenario, self.control.snapshots.heard = self.scenario, self.scenario.published
        self.gateways = gateways
        self.wall_ahead_s = 0.0
        self.asked: list[ClientRequest] = []
        self._rng = Random(f"world {seed}")  # noqa: S311 - chance that can be repeated
        self._seed = seed
        self._group = group
        self._log = log
        self._health: dict[str, Health] = {}
        self._idle: dict[str, list[Connection]] = {node: [] for node in CLIENTS}
        self._asking: dict[asyncio.Task[None], None] = {}
        self._undo: dict[int, Undo] = {}
        self._unwanted: frozenset[str] = frozenset()
        self._network_well_at = 0.0
        self._now = asyncio.get_running_loop().time

    def _control(self, profile: Profile, group: asyncio.TaskGroup, folder: Path) -> Control | ControllerGroup:
        network, machine, event_log, store = self.network, self.machine, self.event_log, self._store
        if profile.controls == 1 or store is None:
            return Control(
                profile,
                network=network,
                machine=machine,
                group=group,
                folder=folder,
                event_log=event_log,
                store=store,
            )
        return ControllerGroup(
            profile, network=network, machine=machine, group=group, folder=folder, event_log=event_log, store=store
        )

    def _scaling_operator(self, seed: int) -> ScalingOperator:
        profile, chance = self.profile, Random(f"scaling {seed}")  # noqa: S311 - chance that can be repeated
        return ScalingOperator(
            profile.replicas, profile.replicas_max, chance, self.event_log, lambda: self.control.controller
        )

    def _scenario(self, seed: int, group: asyncio.TaskGroup, folder: Path) -> RolloutScenario:
        return RolloutScenario(
            self.profile.rollouts,
            Random(f"rollouts {seed}"),  # noqa: S311 - chance that can be repeated
            cluster=self.control.plan.cluster,
            declared=artifact(self.profile),
            replicas=self.profile.replicas,
            whole=self.profile.calm and "replica-dies" not in self.profile.faults,
            folder=folder,
            event_log=self.event_log,
            control=self.control,
            group=group,
        )

    # --- for faults

    @property
    def control_node(self) -> str:
        """The node of control."""
        return self.control.node

    @property
    def snapshot(self) -> Path:
        """The snapshot file."""
        return self.control.shared_snapshot.path

    @property
    def snapshots(self) -> list[bytes]:
        """Earlier snapshots."""
        return self.control.shared_snapshot.all[:-1]

    def change_snapshot(self, data: bytes) -> None:
        """Another process overwrites the snapshot file."""
        self.control.shared_snapshot.change(data)

    def health(self, slot: str) -> Health:
        """The health of the replicas in a slot, which outlives each of them."""
        return self._health.setdefault(slot, Health())

    def upgrade(self, kind: Kind) -> None:
        """Require replacement of all units of a kind."""
        self.control.upgrade(kind)

    def kill_control(self) -> Undo:
        """Kill control until this is undone."""
        if self.control.controller is None:
            return _nothing
        self.control.kill()
        return self.control.start

    # --- the run

    async def run(self) -> None:
        """Run everything, from start to end."""
        self.control.start()
        if not await self._until(lambda: self.in_order, START_S_MAX):
            self.event_log.violated("the cluster starts", self._what_is_wrong())
            return
        self.event_log.note("phase", "chaos")
        if self.scenario is not None:
            self.scenario.begin()
        scaling = self._group.create_task(self.scaling_operator.run()) if self.scaling_operator is not None else None
        watching = self._group.create_task(self._watch())
        loading = self._group.create_task(self._load())
        harming = self._group.create_task(self._harm())
        await asyncio.sleep(self.profile.chaos_s)
        loading.cancel()
        harming.cancel()
        self.event_log.note("phase", "heal")
        self._heal()
        heal_s_max = HEAL_S_MAX + ROLLOUT_S_MAX * bool(self.scenario)
        healed = await self._until(lambda: self.in_order and not self._asking, heal_s_max)
        self.event_log.expect(healed, "the cluster recovers", self._what_is_wrong())
        epoch = self.control.epoch
        if healed:
            await self._probe()
            self.control.check_leader(epoch)
        watching.cancel()
        if scaling is not None:
            scaling.cancel()
        self._judge()
        if healed:
            await self._stop()

    async def end(self) -> None:
        """Kill everything that still runs."""
        self.control.end()
        for process in self.machine.alive:
            self.machine.kill(process)
        await asyncio.sleep(0)
        if self.scenario is not None:
            self.scenario.close()
        if self._store is not None:
            self._store.close()

    async def _main(self, process: Process) -> None:
        """The code of a process."""
        if process.slot.kind is Kind.GATEWAY:
            await gate(process, self._log, self._seed)
        else:
            health, spec = self.health(process.slot.id), process.spec
            if self.scenario is not None and isinstance(spec, WorkerSpec):
                health.nature = self.scenario.nature(spec.revision)
            call_soon = asyncio.get_running_loop().call_soon
            await work(process, health, self.event_log, self._log, partial(call_soon, self.machine.kill, process))

    async def _until(self, holds: Callable[[], bool], seconds_max: float) -> bool:
        until = self._now() + seconds_max
        while not holds():
            if self._now() >= until:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    @property
    def live_gateways(self) -> list[WatchedGateway]:
        """Gateways of running processes."""
        return [gateway for gateway in self.gateways if gateway.process.alive]

    @property
    def in_order(self) -> bool:
        """Whether the desired state is reached, and every gateway knows."""
        replicas = len(self.scenario.wanted) if self.scenario is not None else self.profile.replicas
        set_back = self.scaling_operator is None or not self.scaling_operator.restoring or self.scaling_operator.done
        return (
            set_back
            and self.control.settled
            and all(
                gateway.snapshot == self.control.snapshots.current
                and not gateway.waiting
                and all(link.live for served in gateway.served.values() for link in served.links)
                and sum(len(served.links) for served in gateway.served.values()) == replicas
                for gateway in self.live_gateways
            )
        )

    def _what_is_wrong(self) -> str:
        controller = self.control.controller
        parts = [f"{len(self._asking)} requests are open", f"control: {controller.trouble if controller else 'gone'}"]
        if controller is not None:
            parts += [f"{s.id}.{s.generation} is {s.state} ({s.why})" for s in controller.state.slots]
        for gateway in self.live_gateways:
            links = [f"{x.id}.{x.generation} {x.state}" for served in gateway.served.values() for x in served.links]
            version = gateway.snapshot.version if gateway.snapshot else None
            parts.append(
                f"{gateway.process.node} at {version} of {self.control.snapshots.current.version},"
                f" {gateway.waiting} wait: {', '.join(links)}"
            )
        return "; ".join(parts)

    async def _watch(self) -> None:
        while True:
            told = self.control.shared_snapshot.propagated
            for gateway in self.live_gateways:
                gateway.check()
            if told is not None:
                self._check_known(told)
            self.control.check()
            self._check_work()
            await asyncio.sleep(CHECK_EVERY_S)

    def _check_known(self, told: Snapshot) -> None:
        """All gateways know what control published a while ago; only an older leader's snapshots are ignored."""
        routed: dict[str, int] = {}
        for gateway in self.live_gateways:
            known = gateway.snapshot
            if self._now() - gateway.began <= KNOWN_AFTER_S or (known is not None and known.epoch > told.epoch):
                continue
            self.event_log.expect(known == told, "gateways use the published snapshot", gateway.process.node)
            for link in [link for served in gateway.served.values() for link in served.links if link.live]:
                generation = routed.setdefault(link.id, link.generation)
                twice = f"{link.id}: {generation}, {link.generation}"
                self.event_log.expect(
                    generation == link.generation, "all gateways route to the same generation", twice
                )

    def _check_work(self) -> None:
        """No worker works on requests that no gateway waits for, as far as the network lets it know."""
        if self._now() < self._network_well_at:
            self._unwanted = frozenset()
            return
        wanted = {id for gateway in self.live_gateways for id in wanted_by(gateway)}
        shells = [health.shell for health in self._health.values() if health.shell is not None]
        unwanted = frozenset(id for shell in shells for id in shell.working) - wanted
        for id in sorted(unwanted & self._unwanted):
            self.event_log.violated("no worker works on a cancelled request", id)
        self._unwanted = unwanted

    # --- clients

    async def _load(self) -> None:
        rng, profile = self._rng, self.profile
        while True:
            await asyncio.sleep(rng.expovariate(profile.requests_per_s))
            asked = self._make()
            if asked.stream and rng.random() < profile.leaving:
                asked.leaves_after = rng.randrange(1, 10)
            asked.slow = rng.random() < profile.slow
            self._ask(asked)

    def _make(self) -> ClientRequest:
        rng, profile = self._rng, self.profile
        stream = rng.random() < profile.streams
        body = make_body(rng, stream=stream, tokens_max=profile.tokens_max)
        more = b"x-forebay-priority: batch\r\n" if rng.random() < profile.batch else b""
        if self.scenario is not None:
            more += b"x-forebay-session: caller-%d\r\n" % rng.randrange(CALLERS)
        node = CLIENTS[rng.randrange(len(CLIENTS))]
        asked = ClientRequest(f"r{len(self.asked)}", body, undisturbed(body), stream=stream, node=node, more=more)
        self.asked.append(asked)
        return asked

    def _ask(self, asked: ClientRequest) -> None:
        with self.network.node(asked.node):
            task = self._group.create_task(self._one(asked))
        self._asking[task] = None
        task.add_done_callback(self._asking.pop)

    async def _one(self, asked: ClientRequest) -> None:
        asked.began = self._now()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._connect(asked.node)
        except OSError:  # a TimeoutError is one
            asked.ending, asked.ended = Ending.REFUSED, self._now()
            self.event_log.note("client", asked.id, asked.ending)
            return
        await connection.ask(asked)
        self.event_log.note("client", asked.id, asked.ending, asked.code, asked.status, asked.events, len(asked.text))
        if connection.open:
            self._idle[asked.node].append(connection)

    async def _connect(self, node: str) -> Connection:
        """An idle connection, or a new one. Raises OSError."""
        idle = self._idle[node]
        while idle:
            connection = idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self.event_log), HOST, GATEWAY_PORT)
        return connection

    def _judge(self) -> None:
        strict = self.profile.calm and not (self.scenario is not None and self.scenario.operator.regrets)
        spent = {  # every replica it was sent to died, up to the retry limit
            relay.request_id
            for gateway in self.gateways
            for relay in gateway.taken.values()
            if relay is not None and relay.retries >= GatewaySpec.retries_max
        }
        for asked in self.asked:
            self.event_log.expect(asked.ending is not Ending.OPEN, "every request is answered", asked.id)
            id = asked.id.encode()
            nodes = [gateway.process.node for gateway in self.gateways if id in gateway.taken]
            since, until = asked.began - EXCUSED_S, asked.ended + EXCUSED_S
            judge(
                asked, self.event_log, self.event_log.disturbed(since, until, [*nodes, asked.node] if nodes else ())
            )
            well = asked.ending in (Ending.COMPLETE, Ending.LEFT)
            what = f"{asked.id} {asked.ending} {asked.code} {asked.status}"
            well = well or id in spent
            self.event_log.expect(well or not strict, "no request fails while only control fails", what)
        right = {asked.id: asked.right for asked in self.asked}
        for gateway in self.gateways:
            for decision in (facts.decision for facts in gateway.notes.all):
                true = right.get(decision.request_id)
                if true is None or decision.code != OK or decision.estimated:
                    continue
                told = decision.prompt_tokens, decision.completion_tokens
                wanted = true.prompt_tokens, true.completion_tokens
                self.event_log.expect(
                    told == wanted, "the recorded usage is correct", f"{decision.request_id}: {told}, {wanted}"
                )

    # --- faults

    async def _harm(self) -> None:
        rng, kinds, number = self._rng, self.profile.faults, 0
        while kinds:
            await asyncio.sleep(rng.expovariate(1 / self.profile.fault_every_s))
            kind = rng.choice(kinds)
            self.event_log.note("harm", kind)
            if self.scenario is not None and kind in OF_ROLLOUTS:
                undo = OF_ROLLOUTS[kind](self.scenario, rng)
            elif isinstance(self.control, ControllerGroup) and kind in OF_LEADERS:
                undo = OF_LEADERS[kind](self.control, rng)
            else:
                undo = FAULTS[kind](self, rng)
            lasts_s = rng.uniform(*FAULT_S)
            if undo is not None:
                number += 1
                self._undo[number] = undo
                asyncio.get_running_loop().call_later(lasts_s, self._end_fault, number)
            if kind in OF_NETWORK:
                self._network_well_at = max(self._network_well_at, self._now() + lasts_s + KNOWN_LATE_S)

    def _end_fault(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            undo()

    def _heal(self) -> None:
        for number in list(self._undo):
            self._end_fault(number)
        self.network.heal()
        if self.scenario is not None:
            self.scenario.heal()
        if self.scaling_operator is not None:
            self.scaling_operator.restoring = True

    # --- after the healing

    async def _probe(self) -> None:
        """Check that every new request succeeds."""
        await asyncio.sleep(PROBE_EVERY_S)  # the last requests may still count as load
        for _ in range(PROBES):
            asked = self._make()
            self._ask(asked)
            await self._until(lambda: not self._asking, HEAL_S_MAX)
            await asyncio.sleep(PROBE_EVERY_S)
            well = asked.ending is Ending.COMPLETE or (self.scenario is not None and self.scenario.operator.regrets)
            self.event_log.expect(
                well, "every request succeeds after recovery", f"{asked.id} {asked.ending} {asked.code}"
            )
        await self._try_all()
        await asyncio.sleep(1.0)
        for gateway in self.live_gateways:
            gateway.check_quiet()
        self.control.check()
        if self.scenario is not None:
            self.scenario.check_agreement()

    async def _try_all(self) -> None:
        """Close all breakers again by sending enough requests for all replicas."""
        places = self.profile.replicas * self.profile.concurrency
        for burst in range(BURSTS_MAX):
            if all(gateway.well for gateway in self.live_gateways):
                return
            self._hang_up()
            for _ in range(places * self.profile.gateways * min(1 + burst, BURST_MAX)):
                self._ask(self._make())
            await self._until(lambda: not self._asking, HEAL_S_MAX)
            await asyncio.sleep(PROBE_EVERY_S)
        self.event_log.violated("circuit breakers close again", self._what_is_wrong())

    def _hang_up(self) -> None:
        for connections in self._idle.values():
            while connections:
                connections.pop().leave()

    async def _stop(self) -> None:
        self._hang_up()
        controller = self.control.controller
        assert controller is not None
        if self.scenario is not None:
            self.scenario.end()
        self.control.retire()
        controller.stop()
        stopped = await self._until(lambda: controller.is_over, STOP_S_MAX)
        self.event_log.expect(stopped, "the cluster stops", str(controller.phase))
        self.event_log.expect(
            not self.machine.processes, "no process survives the stop", " ".join(x.node for x in self.machine.alive)
        )
        await asyncio.sleep(1.0)
        self.event_log.expect(not self.network.connections, "no connection is left", str(self.network.connections))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.event_log.expect(len(loop.waiting()) == OWN_TASKS, "no task is left", "; ".join(loop.waiting()))


def _nothing() -> None:
    """No effect: nothing to undo."""
