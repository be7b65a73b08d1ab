"""The workload of a replay through complete gateways: with their listeners, polling and connections, byte for byte.

This includes what the policy depth leaves out; tests show that both depths choose the same replicas.
"""

import asyncio
import io
import math
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, cast

import httptools
import msgspec

from forebay.core.model import Endpoint, GatewaySpec, ModelRoutes, Policy, Replica, ReplicaState, Snapshot, Task
from forebay.core.prefix.blocks import blocks
from forebay.gateway import serve
from forebay.gateway.records.accesslog import AccessLog
from forebay.net.outbox import Outbox
from forebay.obs import log as logs
from forebay.sim.engine import EngineEvent, Job, hardware
from forebay.sim.engine import Replica as Engine
from forebay.sim.load.values import Arrival, Workload
from forebay.sim.loop import run
from forebay.sim.network.network import Network
from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.gateways import BODY, HEAD, MODEL, PRIORITY, REVISION
from forebay.sim.replay.node import Node, Port
from forebay.sim.replay.run import MESSAGES, prompt_text

PORT_FIRST: Final = 9000
LOAD: Final = b"GET /load"
SINCE: Final = b"blocks_since="
LENGTH: Final = b"\r\ncontent-length: "
SIGTERM: Final = 15


class _ResponseSink(asyncio.Protocol):
    """Forwards the responses of a node."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class _NodeConnection(asyncio.Protocol):
    """One connection to a node: load polls, and requests one after the other."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._held = b""
        self._transport: asyncio.Transport
        self._port: Port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._port = Port(self._node, _ResponseSink(self._transport))

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, found, body = self._held.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(LOAD):
            self._held = b""
            self._report(head)
            return
        at = head.index(LENGTH) + len(LENGTH)
        if len(body) >= int(head[at:].partition(b"\r")[0]):
            request, self._held = self._held, b""
            self._port.write(request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.abort()

    def _report(self, head: bytes) -> None:
        target = head.split(b" ", 2)[1]
        report = self._node.report(MODEL, REVISION)
        if SINCE in target:
            report = replace(report, blocks=self._node.news(int(target.partition(SINCE)[2])))
        body = msgspec.json.encode(report)
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


class _Client(asyncio.Protocol):
    """A client's connection to a gateway. `over` is set when the response is complete or has failed."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()

    def on_message_complete(self) -> None:
        """A response is complete."""
        self.over.set()


def decisions(workload: Workload, cluster: SimCluster, *, policy: str, seed: int = 0) -> list[int]:
    """The replica that finished each request, by arrival number; -1: none."""
    rng = Random(seed)  # noqa: S311 - chance that can be repeated
    network = Network(Random(f"network {seed}"))  # noqa: S311
    with tempfile.TemporaryDirectory(prefix="forebay-sim-") as folder:
        main = _GatewayReplay(workload, cluster, policy, rng, network).run(Path(folder))
        return run(main, seconds_max=math.inf, network=network, seed=seed)


class _GatewayReplay:
    """One run. Random numbers are drawn as in a replay."""

    def __init__(self, workload: Workload, cluster: SimCluster, policy: str, rng: Random, network: Network) -> None:
        self._arrivals = workload.arrivals
        self._cluster = cluster
        self._policy = Policy(policy)
        self._rng = rng
        self._network = network
        self._jobs: dict[int, Job] = {}
        self._served = [-1] * len(workload.arrivals)
        self._idle: dict[int, list[_Client]] = {}

    async def run(self, folder: Path) -> list[int]:
        """From the first arrival to the last response."""
        loop = asyncio.get_running_loop()
        await self._start_nodes(folder)
        signals = []
        async with asyncio.TaskGroup() as group:
            for at in range(self._cluster.gateways):
                rng = Random(self._rng.randrange(2**32))  # noqa: S311 - chance that can be repeated
                spec = self._spec(at, folder)
                told: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
                signals.append(told)
                with self._network.node(spec.id):
                    log = logs.configure(io.StringIO())
                    outbox = Outbox(None)  # otherwise gateways that share a loop would share its flush round
                    group.create_task(serve.run(spec, log, AccessLog(io.BytesIO()), told, rng, outbox=outbox))
            while not all((folder / f"{at}.json").exists() for at in range(len(signals))):  # noqa: ASYNC110 - a file tells nobody that it is there
                await asyncio.sleep(0)
            self._ports = [
                msgspec.json.decode((folder / f"{at}.json").read_bytes(), type=Endpoint).port
                for at in range(len(signals))
            ]
            async with asyncio.TaskGroup() as asking:
                for id, arrival in enumerate(self._arrivals):
                    if arrival.at_s > loop.time():
                        over = asyncio.Event()
                        loop.call_at(arrival.at_s, over.set)
                        await over.wait()
                    at = 0 if len(signals) == 1 else self._rng.randrange(len(signals))
                    asking.create_task(self._ask(id, arrival, at))
            for told in signals:
                told.put_nowait(SIGTERM)
        return self._served

    async def _start_nodes(self, folder: Path) -> None:
        cluster, loop, replicas = self._cluster, asyncio.get_running_loop(), []
        for at, speed in enumerate(cluster.speeds_of_all):
            engine = Engine(
                hardware(cluster.gpu, cluster.model, cluster.tensor_parallel, cluster.precision),
                sequences_max=cluster.sequences_max,
                step_tokens_max=cluster.step_tokens_max,
                kv_tokens=cluster.kv_tokens,
                speed=speed,
            )

            def done(event: EngineEvent, at: int = at) -> None:
                self._served[event.id] = at

            node = Node(
                f"sim-{at}",
                engine,
                self._jobs,
                room=cluster.sequences_max,
                reports_blocks=cluster.reports_blocks,
                done=done,
            )
            with self._network.node(node.id):
                await loop.create_server(partial(_NodeConnection, node), "127.0.0.1", PORT_FIRST + at)
            replicas.append(Replica(node.id, 1, REVISION, "127.0.0.1", PORT_FIRST + at, ReplicaState.READY))
        routes = ModelRoutes(
            MODEL,
            Task.CHAT,
            self._policy,
            REVISION,
            cluster.queue_max,
            cluster.queue_timeout_s,
            replicas=tuple(sorted(replicas, key=lambda each: each.id)),
            ttft_budget_s=cluster.slo.ttft_s,
        )
        (folder / "snapshot.json").write_bytes(msgspec.json.encode(Snapshot(1, (routes,))))

    def _spec(self, at: int, folder: Path) -> GatewaySpec:
        return GatewaySpec(
            f"gateway-{at}",
            1,
            "127.0.0.1",
            0,
            snapshot_path=str(folder / "snapshot.json"),
            endpoint_path=str(folder / f"{at}.json"),
            peers_dir=str(folder / "peers"),
            load_poll_s=self._cluster.report_every_s,
        )

    async def _ask(self, id: int, arrival: Arrival, at: int) -> None:
        messages = MESSAGES % prompt_text(arrival, id)
        held = blocks(memoryview(messages), MODEL)[: max(0, arrival.prompt_tokens - 1) // 512]
        self._jobs[id] = Job(id, arrival.prompt_tokens, arrival.output_tokens, held)
        body = BODY % messages
        more = PRIORITY % arrival.band.encode() if arrival.band else b""
        idle = self._idle.setdefault(at, [])
        if idle:
            client = idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, client = await loop.create_connection(_Client, "127.0.0.1", self._ports[at])
        client.over.clear()
        client.transport.write(HEAD % (id, more, len(body), body))
        await client.over.wait()
        if not client.transport.is_closing():
            idle.append(client)
