"""The product's own gateways in a simulation, and byte-exact clients.

Left out is what no decision depends on: sockets, files, and control's announcement of replicas.
"""

import asyncio
import io
from collections.abc import Callable
from random import Random
from typing import Final

from forebay.core.errors import OK
from forebay.core.model import GatewaySpec, Limits, LoadReport, ModelRoutes, Replica, ReplicaState, Snapshot
from forebay.gateway.asking import COUNTING
from forebay.gateway.dispatch.endpoints import ENDPOINTS
from forebay.gateway.fleet import Served
from forebay.gateway.gateway import Gateway
from forebay.gateway.link import Link
from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.records.entries import RequestLog
from forebay.gateway.scheduling.scheduler import Scheduler
from forebay.net.client import Pool
from forebay.net.connection import Connection
from forebay.net.server import HttpServer
from forebay.obs.metrics import Metrics
from forebay.sim.engine import Job
from forebay.sim.load.traces.lines import TOKENS_MAX
from forebay.sim.replay.borrowed import Borrowed
from forebay.sim.replay.node import Node
from forebay.wire.errors import error_code

MODEL: Final = "model"
REVISION: Final = "r-0"
ENDPOINT: Final = ENDPOINTS[b"/v1/chat/completions"]
LIMITS: Final = Limits(body_bytes_max=2 * TOKENS_MAX)
"""Large enough for a prompt of any trace, at a byte per token: engines reject prompts that are too long."""
TICK_S: Final = 0.25
"""Interval at which a gateway checks its queues, as in the product."""
HEAD: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\n"
    b"x-request-id: %d\r\n%bcontent-length: %d\r\n\r\n%b"
)
PRIORITY: Final = b"x-forebay-priority: %b\r\n"
BODY: Final = b'{"model":"' + MODEL.encode() + b'","stream":true,"messages":%b}'
END: Final = b"0\r\n\r\n"
CUT: Final = "cut_off"
"""The connection was closed before the response was complete."""
UNKNOWN: Final = "unknown"


class Client(asyncio.Transport):
    """A client's connection, which observes the first byte and the end of every response."""

    def __init__(self, gate: "Gate") -> None:
        super().__init__()
        self.id = -1
        self._gate = gate
        self._began = False
        self._connection = Connection(gate.server)
        self._connection.connection_made(self)

    def ask(self, id: int, request: bytes) -> None:
        """Send a request; the previous one must have been answered."""
        self.id, self._began = id, False
        self._connection.data_received(request)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """A part of the response."""
        if not self._began:
            self._began = True
            if int(data[9:12]) != 200:
                self._gate.ended(self, error_code(bytes(data).partition(b"\r\n\r\n")[2]) or UNKNOWN)
            else:
                self._gate.began(self)
        if data[-5:] == END:
            self._gate.ended(self, OK)

    def abort(self) -> None:
        """The gateway closes the connection."""
        self._gate.ended(self, CUT)

    close = abort

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """No effect: nothing is buffered."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


class Gate:
    """One gateway, its links to replicas, and its clients. Calls `began(id)` and `ended(id, code)`."""

    def __init__(
        self,
        at: int,
        routes: ModelRoutes,
        group: asyncio.TaskGroup,
        *,
        gateways: int,
        rng: Random,
        began: Callable[[int], None],
        ended: Callable[[int, str], None],
    ) -> None:
        spec = GatewaySpec(f"gateway-{at}", 1, "", 0, "", "", "")
        self.metrics = Metrics()
        self.scheduler = Scheduler(spec, RequestLog(AccessLog(io.BytesIO())), rng)
        self.gateway = Gateway(self.scheduler, self.metrics)
        self.server = HttpServer(lambda exchange: self.gateway.handle(exchange, ENDPOINT), LIMITS)
        self._began = began
        self._ended = ended
        self._group = group
        self._idle: list[Client] = []
        self._borrowed: Borrowed | None = None
        self._links: dict[str, tuple[int, Link]] = {}
        """By replica, with its number among all replicas so far."""
        self.served = self.scheduler.served[MODEL] = Served(routes, self.gateway.account(MODEL))
        self.served.pricing.gateways = gateways
        self.gateway.snapshot = Snapshot(1, (routes,))
        self.gateway.dispatcher.take_over(self.gateway.snapshot)

    def link(self, node: Node, at: int) -> None:
        """Add replica number `at`."""
        replica = Replica(node.id, 1, REVISION, node.id, 1, ReplicaState.READY)
        link = self.served.link(replica, Pool(node.id, 1, self._group))
        self.served.links.append(link)
        self._links[node.id] = at, link
        if self._borrowed is not None:
            self._borrowed.link(node)

    def spare(self, node: Node) -> None:
        """Stop sending requests to a replica, which drains."""
        self._links[node.id][1].plan(ReplicaState.DRAINING)

    def unlink(self, node: Node) -> None:
        """Remove a replica."""
        _, link = self._links.pop(node.id)
        self.served.links = [each for each in self.served.links if each is not link]
        self.served.unlink(link)

    def borrow(self, rival: Borrowed) -> None:
        """Let another system's policy choose replicas."""
        self._borrowed = rival
        self.scheduler.chooser = rival.choose

    def hear(self, node: Node, report: LoadReport, now: float) -> None:
        """Apply a replica's load report and dispatch queued requests, as a gateway does after each report."""
        served = self.served
        at, link = self._links[node.id]
        served.apply_report(link, report, len(link.attempts), now, now)
        if self._borrowed is not None:
            self._borrowed.hear(at, node, now)
        elif link.blocks_seq is not None and served.routes.policy not in COUNTING:
            news = node.news(link.blocks_seq)
            if news is not None:
                served.apply_blocks(link, news, now)
        self.scheduler.pump(served)

    def ask(self, job: Job, messages: bytes, band: str, tenant: str) -> None:
        """Let a client send a prompt, given as the JSON of its messages."""
        id = job.id
        if self._borrowed is not None:
            self._borrowed.asked, self._borrowed.tenant = job, tenant
        body = BODY % messages
        more = PRIORITY % band.encode() if band else b""
        client = self._idle.pop() if self._idle else Client(self)
        client.ask(id, HEAD % (id, more, len(body), body))

    def began(self, client: Client) -> None:
        """A client got the first byte of its response."""
        if self._borrowed is not None:
            self._borrowed.began(client.id)
        self._began(client.id)

    def ended(self, client: Client, code: str) -> None:
        """A client got its response, an error, or a closed connection."""
        id = client.id
        if self._borrowed is not None:
            self._borrowed.ended(id)
        if code != CUT:
            self._idle.append(client)
        self._ended(id, code)

    def close(self) -> None:
        """Close the connections to replicas."""
        for link in self.served.links:
            link.pool.close()
