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
from forebay.sim.full.book import Book
from forebay.sim.full.clients import Asked, Connection, Ending, judge, make_body, undisturbed
from forebay.sim.full.control import GATEWAY_PORT, KNOWN_AFTER_S, Control, artifact
from forebay.sim.full.faults import FAULTS, Undo
from forebay.sim.full.gateways import WatchedGateway, gate, wanted_by
from forebay.sim.full.leading.faults import FAULTS as OF_LEADERS
from forebay.sim.full.leading.several import Several
from forebay.sim.full.machine import Machine, Process
from forebay.sim.full.profile import Profile
from forebay.sim.full.replica import Health, work
from forebay.sim.full.rollouts.faults import FAULTS as OF_ROLLOUTS
from forebay.sim.full.rollouts.stage import Stage
from forebay.sim.full.rollouts.store import open_quick
from forebay.sim.full.scaling.people import Hand
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
        book: Book,
        gateways: list[WatchedGateway],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.profile = profile
        self.network = network
        self.book = book
        self.clients = CLIENTS
        self.machine = Machine(network, group, folder, book, self._main)
        self._store = open_quick(f"sqlite:///{folder / 'control.db'}") if profile.stores else None
        self.control = self._control(profile, group, folder)
        self.hand = self._hand(seed) if profile.scaling else None
        self.stage = self._stage(seed, group, folder) if profile.rollouts else None
        if self.stage is not None:
            self.control.stage, self.control.snapshots.heard = self.stage, self.stage.published
        self.gateways = gateways
        self.wall_ahead_s = 0.0
        self.asked: list[Asked] = []
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

    def _control(self, profile: Profile, group: asyncio.TaskGroup, folder: Path) -> Control | Several:
        network, machine, book, store = self.network, self.machine, self.book, self._store
        if profile.controls == 1 or store is None:
            return Control(
                profile, network=network, machine=machine, group=group, folder=folder, book=book, store=store
            )
        return Several(profile, network=network, machine=machine, group=group, folder=folder, book=book, store=store)

    def _hand(self, seed: int) -> Hand:
        profile, chance = self.profile, Random(f"scaling {seed}")  # noqa: S311 - chance that can be repeated
        return Hand(profile.replicas, profile.replicas_max, chance, self.book, lambda: self.control.controller)

    def _stage(self, seed: int, group: asyncio.TaskGroup, folder: Path) -> Stage:
        return Stage(
            self.profile.rollouts,
            Random(f"rollouts {seed}"),  # noqa: S311 - chance that can be repeated
            cluster=self.control.plan.cluster,
            declared=artifact(self.profile),
            replicas=self.profile.replicas,
            whole=self.profile.calm and "replica-dies" not in self.profile.faults,
            folder=folder,
            book=self.book,
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
        return self.control.paper.path

    @property
    def snapshots(self) -> list[bytes]:
        """Earlier snapshots."""
        return self.control.paper.all[:-1]

    def change_snapshot(self, data: bytes) -> None:
        """Another process overwrites the snapshot file."""
        self.control.paper.change(data)

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
            self.book.violated("a cluster starts", self._what_is_wrong())
            return
        self.book.note("phase", "chaos")
        if self.stage is not None:
            self.stage.begin()
        scaling = self._group.create_task(self.hand.run()) if self.hand is not None else None
        watching = self._group.create_task(self._watch())
        loading = self._group.create_task(self._load())
        harming = self._group.create_task(self._harm())
        await asyncio.sleep(self.profile.chaos_s)
        loading.cancel()
        harming.cancel()
        self.book.note("phase", "heal")
        self._heal()
        heal_s_max = HEAL_S_MAX + ROLLOUT_S_MAX * bool(self.stage)
        healed = await self._until(lambda: self.in_order and not self._asking, heal_s_max)
        self.book.expect(healed, "all is in order again", self._what_is_wrong())
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
        if self.stage is not None:
            self.stage.close()
        if self._store is not None:
            self._store.close()

    async def _main(self, process: Process) -> None:
        """The code of a process."""
        if process.slot.kind is Kind.GATEWAY:
            await gate(process, self._log, self._seed)
        else:
            health, spec = self.health(process.slot.id), process.spec
            if self.stage is not None and isinstance(spec, WorkerSpec):
                health.nature = self.stage.nature(spec.revision)
            call_soon = asyncio.get_running_loop().call_soon
            await work(process, health, self.book, self._log, partial(call_soon, self.machine.kill, process))

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
        replicas = len(self.stage.wanted) if self.stage is not None else self.profile.replicas
        set_back = self.hand is None or not self.hand.rests or self.hand.done
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
            told = self.control.paper.told
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
            self.book.expect(known == told, "gateways route on what control says", gateway.process.node)
            for link in [link for served in gateway.served.values() for link in served.links if link.live]:
                generation = routed.setdefault(link.id, link.generation)
                twice = f"{link.id}: {generation}, {link.generation}"
                self.book.expect(generation == link.generation, "no two generations are routed at once", twice)

    def _check_work(self) -> None:
        """No worker works on requests that no gateway waits for, as far as the network lets it know."""
        if self._now() < self._network_well_at:
            self._unwanted = frozenset()
            return
        wanted = {id for gateway in self.live_gateways for id in wanted_by(gateway)}
        shells = [health.shell for health in self._health.values() if health.shell is not None]
        unwanted = frozenset(id for shell in shells for id in shell.working) - wanted
        for id in sorted(unwanted & self._unwanted):
            self.book.violated("nobody works for who has left", id)
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

    def _make(self) -> Asked:
        rng, profile = self._rng, self.profile
        stream = rng.random() < profile.streams
        body = make_body(rng, stream=stream, tokens_max=profile.tokens_max)
        more = b"x-forebay-priority: batch\r\n" if rng.random() < profile.batch else b""
        if self.stage is not None:
            more += b"x-forebay-session: caller-%d\r\n" % rng.randrange(CALLERS)
        node = CLIENTS[rng.randrange(len(CLIENTS))]
        asked = Asked(f"r{len(self.asked)}", body, undisturbed(body), stream=stream, node=node, more=more)
        self.asked.append(asked)
        return asked

    def _ask(self, asked: Asked) -> None:
        with self.network.node(asked.node):
            task = self._group.create_task(self._one(asked))
        self._asking[task] = None
        task.add_done_callback(self._asking.pop)

    async def _one(self, asked: Asked) -> None:
        asked.began = self._now()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._connect(asked.node)
        except OSError:  # a TimeoutError is one
            asked.ending, asked.ended = Ending.REFUSED, self._now()
            self.book.note("client", asked.id, asked.ending)
            return
        await connection.ask(asked)
        self.book.note("client", asked.id, asked.ending, asked.code, asked.status, asked.events, len(asked.text))
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
        _, connection = await loop.create_connection(lambda: Connection(self.book), HOST, GATEWAY_PORT)
        return connection

    def _judge(self) -> None:
        strict = self.profile.calm and not (self.stage is not None and self.stage.operator.regrets)
        spent = {  # every replica it was sent to died, up to the retry limit
            relay.request_id
            for gateway in self.gateways
            for relay in gateway.taken.values()
            if relay is not None and relay.retries >= GatewaySpec.retries_max
        }
        for asked in self.asked:
            self.book.expect(asked.ending is not Ending.OPEN, "no silence", asked.id)
            id = asked.id.encode()
            nodes = [gateway.process.node for gateway in self.gateways if id in gateway.taken]
            since, until = asked.began - EXCUSED_S, asked.ended + EXCUSED_S
            judge(asked, self.book, self.book.disturbed(since, until, [*nodes, asked.node] if nodes else ()))
            well = asked.ending in (Ending.COMPLETE, Ending.LEFT)
            what = f"{asked.id} {asked.ending} {asked.code} {asked.status}"
            well = well or id in spent
            self.book.expect(well or not strict, "no request fails where nothing but control does", what)
        right = {asked.id: asked.right for asked in self.asked}
        for gateway in self.gateways:
            for decision in (facts.decision for facts in gateway.notes.all):
                true = right.get(decision.request_id)
                if true is None or decision.code != OK or decision.estimated:
                    continue
                told = decision.prompt_tokens, decision.completion_tokens
                wanted = true.prompt_tokens, true.completion_tokens
                self.book.expect(told == wanted, "usage is what was used", f"{decision.request_id}: {told}, {wanted}")

    # --- faults

    async def _harm(self) -> None:
        rng, kinds, number = self._rng, self.profile.faults, 0
        while kinds:
            await asyncio.sleep(rng.expovariate(1 / self.profile.fault_every_s))
            kind = rng.choice(kinds)
            self.book.note("harm", kind)
            if self.stage is not None and kind in OF_ROLLOUTS:
                undo = OF_ROLLOUTS[kind](self.stage, rng)
            elif isinstance(self.control, Several) and kind in OF_LEADERS:
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
        if self.stage is not None:
            self.stage.heal()
        if self.hand is not None:
            self.hand.rests = True

    # --- after the healing

    async def _probe(self) -> None:
        """Check that every new request succeeds."""
        await asyncio.sleep(PROBE_EVERY_S)  # the last requests may still count as load
        for _ in range(PROBES):
            asked = self._make()
            self._ask(asked)
            await self._until(lambda: not self._asking, HEAL_S_MAX)
            await asyncio.sleep(PROBE_EVERY_S)
            well = asked.ending is Ending.COMPLETE or (self.stage is not None and self.stage.operator.regrets)
            self.book.expect(well, "after the healing all succeeds", f"{asked.id} {asked.ending} {asked.code}")
        await self._try_all()
        await asyncio.sleep(1.0)
        for gateway in self.live_gateways:
            gateway.check_quiet()
        self.control.check()
        if self.stage is not None:
            self.stage.check_agreement()

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
        self.book.violated("breakers close again", self._what_is_wrong())

    def _hang_up(self) -> None:
        for connections in self._idle.values():
            while connections:
                connections.pop().leave()

    async def _stop(self) -> None:
        self._hang_up()
        controller = self.control.controller
        assert controller is not None
        if self.stage is not None:
            self.stage.end()
        self.control.retire()
        controller.stop()
        stopped = await self._until(lambda: controller.is_over, STOP_S_MAX)
        self.book.expect(stopped, "a cluster stops", str(controller.phase))
        self.book.expect(not self.machine.processes, "nothing runs on", " ".join(x.node for x in self.machine.alive))
        await asyncio.sleep(1.0)
        self.book.expect(not self.network.connections, "no connection is left", str(self.network.connections))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.book.expect(len(loop.waiting()) == OWN_TASKS, "no task is left", "; ".join(loop.waiting()))


def _nothing() -> None:
    """No effect: nothing to undo."""
