"""Replay a workload against a cluster, and record requests and replicas."""

import asyncio
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Final, cast

from forebay.core.cluster import Slo
from forebay.core.model import ModelRoutes, Policy, Task
from forebay.core.prefix.blocks import blocks
from forebay.sim.engine import EngineEvent, Job, Replica, hardware
from forebay.sim.load.values import Arrival, Workload
from forebay.sim.loop import run
from forebay.sim.replay.borrowed import Borrowed
from forebay.sim.replay.changing import LOOK_S, Changing, Sizing
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.gateways import MODEL, REVISION, TICK_S, Gate
from forebay.sim.replay.node import Node, Port
from forebay.sim.replay.outcome import Outcome, Work, Worked
from forebay.sim.rivals.table import RIVALS

MESSAGES: Final = b'[{"role":"user","content":"%b"}]'
BLOCK_TEXT: Final = 32
"""Repetitions of a 16-digit id: at one byte per token, the 512 tokens of a block."""
ALONE: Final = 1 << 63
"""First id of unique prompt parts."""
UNLIMITED: Final = 1_000_000
"""Capacity of a replica for policies that leave queueing to it."""
PROGRESS_EVERY: Final = 256


class _Wires:
    """Connections to the simulated nodes."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}

    async def create_server(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str | None, port: int, **options: object
    ) -> asyncio.AbstractServer:
        raise OSError("nothing listens in a replay")

    async def create_connection(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **options: object
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        protocol = cast(asyncio.Protocol, factory())
        transport = Port(self.nodes[host], protocol)
        protocol.connection_made(transport)
        return transport, protocol


def replay(
    workload: Workload,
    cluster: SimCluster,
    *,
    policy: str,
    seed: int = 0,
    sizing: Sizing | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Let every request of the workload arrive at its time. Deterministic for equal arguments.

    Without `sizing` there are always `cluster.replicas`. Rival policies support only a constant size and raise
    ValueError otherwise.
    """
    if sizing is not None and sizing.sizer is not None and policy in RIVALS:
        raise ValueError(f"{policy} knows no replicas that come and go")
    wires = _Wires()
    what = _Replay(workload, cluster, policy, seed, sizing)
    with _quiet_gc():
        return run(what.run(wires, progress), seconds_max=math.inf, network=wires, seed=seed)


class _Replay:
    def __init__(
        self, workload: Workload, cluster: SimCluster, policy: str, seed: int, sizing: Sizing | None
    ) -> None:
        self._arrivals = workload.arrivals
        self._cluster = cluster
        self._policy = policy
        self._seed = seed
        self._rng = Random(seed)  # noqa: S311 - chance that can be repeated
        self._sizing = sizing or Sizing(cluster.replicas)
        self._jobs: dict[int, Job] = {}
        self._nodes: list[Node] = []
        """Current replicas."""
        self._worked: list[Worked] = []
        """Work of all replicas, including removed ones."""
        self._gates: list[Gate] = []
        self._told: list[dict[str, int]] = []
        """Per gateway, by node: the last version received."""
        self._next = 0
        self._open = 0
        self._outcome = Outcome(len(workload.arrivals))
        self._watching: set[Callable[[], None]] = set()
        """The timers that run."""

    async def run(self, wires: _Wires, progress: Callable[[int], None]) -> Outcome:
        self._loop = loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        self._progress = progress
        async with asyncio.TaskGroup() as group:
            self._wires = wires.nodes
            changing = self._build(group)
            if self._arrivals:
                loop.call_at(self._arrivals[0].at_s, self._arrive)
                if self._sizing.sizer is not None:
                    loop.call_at(LOOK_S, self._look, changing, 1)
                await self._over
            for gate in self._gates:
                gate.close()
        self._outcome.close(loop.time(), self._worked)
        changing.close(loop.time(), self._outcome)
        return self._outcome

    def _build(self, group: asyncio.TaskGroup) -> Changing:
        cluster, rival = self._cluster, RIVALS.get(self._policy)
        policy = Policy.CPR if rival is not None else Policy(self._policy)
        routes = ModelRoutes(
            MODEL, Task.CHAT, policy, REVISION, cluster.queue_max, cluster.queue_timeout_s,
            ttft_budget_s=cluster.slo.ttft_s, on_demand=self._sizing.on_demand,
        )  # fmt: skip
        for at in range(cluster.gateways):
            rng = Random(self._rng.randrange(2**32))  # noqa: S311
            gate = Gate(at, routes, group, gateways=cluster.gateways, rng=rng, began=self._began, ended=self._ended)
            if rival is not None:
                gate.borrow(Borrowed(rival, self._jobs, self._loop.time, rng))
            self._gates.append(gate)
            self._told.append({})
        slo = cluster.slo
        chance = Random(f"starts {self._seed}")  # noqa: S311 - chance that can be repeated
        promise = Slo(ttft_p99_ms=slo.ttft_s * 1000, tpot_p99_ms=slo.tpot_s * 1000)
        return Changing(self._sizing, promise, self, chance, cluster.tensor_parallel)

    def join(self, at: int) -> Node:
        """Add a replica, for `changing`."""
        node = self._node(at)
        self._nodes.append(node)
        self._wires[node.id] = node
        self._worked.append(node.engine)
        report, now = node.report(MODEL, REVISION), self._loop.time()
        for gate, told in zip(self._gates, self._told, strict=True):
            gate.link(node, at)
            told[node.id] = node.version
            gate.hear(node, report, now)
        return node

    def spare(self, node: Node) -> None:
        """It gets no more requests."""
        for gate in self._gates:
            gate.spare(node)

    def part(self, node: Node) -> None:
        """Remove it; only its work statistics are kept."""
        self._nodes.remove(node)
        del self._wires[node.id]
        engine = node.engine
        done = Work(0, engine.prefilled_tokens, engine.hit_tokens, engine.busy_s, engine.preemptions)
        self._worked[self._worked.index(engine)] = done
        for gate, told in zip(self._gates, self._told, strict=True):
            del told[node.id]
            gate.unlink(node)

    def _node(self, at: int) -> Node:
        cluster = self._cluster
        engine = Replica(
            hardware(cluster.gpu, cluster.model, cluster.tensor_parallel, cluster.precision),
            sequences_max=cluster.sequences_max,
            step_tokens_max=cluster.step_tokens_max,
            kv_tokens=cluster.kv_tokens,
            speed=cluster.speeds[at % len(cluster.speeds)],
        )
        return Node(
            f"sim-{at}",
            engine,
            self._jobs,
            room=UNLIMITED if self._policy in RIVALS else cluster.sequences_max,
            reports_blocks=cluster.reports_blocks,
            done=partial(self._served, at),
        )

    # --- requests

    def _arrive(self) -> None:
        id = self._next
        arrival = self._arrivals[id]
        self._next += 1
        if self._next < len(self._arrivals):
            self._loop.call_at(self._arrivals[self._next].at_s, self._arrive)
        self._open += 1
        messages = MESSAGES % prompt_text(arrival, id)
        held = blocks(memoryview(messages), MODEL)[: max(0, arrival.prompt_tokens - 1) // 512]
        job = self._jobs[id] = Job(id, arrival.prompt_tokens, arrival.output_tokens, held)
        self._outcome.arrived(id, self._loop.time(), arrival)
        self._watch()
        gates = self._gates
        gate = gates[0] if len(gates) == 1 else gates[self._rng.randrange(len(gates))]
        gate.ask(job, messages, arrival.band, arrival.tenant)

    def _began(self, id: int) -> None:
        self._outcome.first_at[id] = self._loop.time()

    def _ended(self, id: int, code: str) -> None:
        self._outcome.ended(id, self._loop.time(), code)
        del self._jobs[id]
        self._open -= 1
        if id % PROGRESS_EVERY == 0:
            self._progress(self._next - self._open)
        if not self._open and self._next == len(self._arrivals) and not self._over.done():
            self._over.set_result(None)

    def _served(self, at: int, event: EngineEvent) -> None:
        self._outcome.served(event.id, at, event.cached_tokens)

    # --- time

    def _watch(self) -> None:
        """Run the gateways' timers while requests are open."""
        for period_s, do in ((TICK_S, self._tick), (self._cluster.report_every_s, self._poll)):
            if do not in self._watching:
                self._watching.add(do)
                self._every(period_s, do)

    def _every(self, period_s: float, do: Callable[[], None]) -> None:
        """Call `do` at multiples of a period while requests are open."""
        turn = int(self._loop.time() / period_s) + 1
        self._loop.call_at(turn * period_s, self._again, turn, period_s, do)

    def _again(self, turn: int, period_s: float, do: Callable[[], None]) -> None:
        do()
        if self._open:
            turn += 1  # multiples, as repeated addition would drift
            self._loop.call_at(turn * period_s, self._again, turn, period_s, do)
        else:
            self._watching.remove(do)

    def _look(self, changing: Changing, turn: int) -> None:
        if not self._over.done():
            changing.look(self._loop.time(), self._gates)
            self._loop.call_at((turn + 1) * LOOK_S, self._look, changing, turn + 1)

    def _tick(self) -> None:
        for gate in self._gates:
            gate.scheduler.expire()

    def _poll(self) -> None:
        """Gateways poll replicas; unchanged reports are skipped."""
        now = self._loop.time()
        # all are polled before any report is processed
        reports = [(node, node.report(MODEL, REVISION)) for node in self._nodes]
        for gate, told in zip(self._gates, self._told, strict=True):
            for node, report in reports:
                if told[node.id] != node.version:
                    told[node.id] = node.version
                    gate.hear(node, report, now)


def prompt_text(arrival: Arrival, id: int) -> bytes:
    """A prompt with one byte per token, sharing prefixes as its blocks say."""
    known = b"".join([b"%016x" % block * BLOCK_TEXT for block in arrival.blocks])
    missing = arrival.prompt_tokens - len(known)
    return (
        known + (b"%016x" % (ALONE | id) * (missing // 16 + 1))[:missing] if missing > 0 else known[: missing or None]
    )


@contextmanager
def _quiet_gc() -> Iterator[None]:
    """Reduce garbage collection: scanning a long replay's live objects would find nothing."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
