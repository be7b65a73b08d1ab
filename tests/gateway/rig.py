"""A gateway in the test's own loop, in front of small workers that speak the workers' protocol, well or badly."""

import asyncio
import contextlib
import io
import re
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from tests.net.rig import Answer, Peer, peer, until

from forebay.core.model import (
    Endpoint,
    GatewaySpec,
    Limits,
    LoadReport,
    ModelRoutes,
    Policy,
    Replica,
    ReplicaState,
    Snapshot,
    Task,
)
from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.serve import run
from forebay.net.server import Exchange, Handler, HttpServer
from forebay.obs import log

CHAT = b"/v1/chat/completions"
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
JSON = (b"content-type", b"application/json")
USAGE = (b"x-forebay-usage", b"7,3,2")
RETRYABLE = (b"x-forebay-retryable", b"1")


def chat(model: str = "chat", **more: Any) -> bytes:
    """The body of a chat request."""
    return msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": "secret prompt"}], **more})


def post(body: bytes, target: bytes = CHAT, *fields: bytes) -> bytes:
    """A POST request."""
    lines = b"".join(line + b"\r\n" for line in fields)
    return b"POST %b HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n%b" % (target, lines, len(body), body)


def whole(exchange: Exchange) -> None:
    """Answer well, at once."""
    exchange.respond(200, [JSON, USAGE, (b"x-request-id", b"workers-own")], b'{"object":"chat.completion"}')


def events(exchange: Exchange) -> None:
    """Answer well, with a stream."""
    exchange.start(200, [EVENT_STREAM, (b"cache-control", b"no-cache")])
    for n in range(3):
        exchange.write(b'data: {"n":%d}\n\n' % n)
    exchange.write(b"data: [DONE]\n\n")
    exchange.end([USAGE])


def failing(status: int, code: str, *headers: tuple[bytes, bytes]) -> Handler:
    """Refuse with an error object."""
    body = msgspec.json.encode({"error": {"message": "m", "type": "t", "param": None, "code": code}})
    return lambda exchange: exchange.respond(status, [JSON, *headers], body)


def silent(exchange: Exchange) -> None:
    """Never answer."""


@dataclass
class Worker:
    """A worker: `answer` serves its requests, `report` is what it says of itself."""

    answer: Handler = whole
    replica: str = "chat-0"
    model: str = "chat"
    generation: int = 1
    report: LoadReport = field(init=False)
    requests: list[Exchange] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    mute: bool = False
    polls: int = 0
    server: HttpServer = field(init=False)
    state: ReplicaState = ReplicaState.READY
    revision: str = "r1"

    def __post_init__(self) -> None:
        self.report = LoadReport(
            self.replica, self.generation, self.model, self.revision, ReplicaState.READY, capacity=8
        )

    def handle(self, exchange: Exchange) -> None:
        if exchange.path == "/load":
            self.polls += 1
            if not self.mute:
                exchange.respond(200, [JSON], msgspec.json.encode(self.report))
            return
        self.requests.append(exchange)
        self.bodies.append(exchange.body)
        self.answer(exchange)

    def row(self) -> Replica:
        return Replica(self.replica, self.generation, self.revision, "127.0.0.1", self.server.port, self.state)


@contextlib.asynccontextmanager
async def working(*workers: Worker) -> AsyncIterator[None]:
    """Run workers."""
    for worker in workers:
        worker.server = HttpServer(worker.handle, Limits())
        await worker.server.start("127.0.0.1", 0)
    try:
        yield
    finally:
        for worker in workers:
            worker.server.close()
        await until(lambda: not any(worker.server.connections for worker in workers))


ROUTES = ModelRoutes("chat", Task.CHAT, Policy.ROUND_ROBIN, "r1", queue_max=8, queue_timeout_s=20.0)


@dataclass
class Front:
    """A running gateway."""

    port: int
    spec: GatewaySpec
    signals: "asyncio.Queue[int]"
    done: "asyncio.Task[None]"
    access: io.BytesIO

    async def ask(self, request: bytes) -> Answer:
        async with peer(self.port) as client:
            client.send(request)
            return await client.answer()

    async def get(self, path: bytes) -> Answer:
        return await self.ask(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % path)

    async def metric(self, line: str) -> float:
        """The sum over all gateways."""
        text = re.sub(r'\{gateway="[^"]+"\}|(?<=\{)gateway="[^"]+",', "", (await self.get(b"/metrics")).body.decode())
        return sum(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line + " "))

    async def ready(self) -> None:
        async with asyncio.timeout(10):
            while (await self.get(b"/readyz")).status != 200:
                await asyncio.sleep(0.005)

    def write(self, *models: ModelRoutes) -> None:
        write_snapshot(Path(self.spec.snapshot_path), *models)

    def lines(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.access.getvalue().splitlines()]


def write_snapshot(path: Path, *models: ModelRoutes) -> None:
    """Write a snapshot like control does."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(Snapshot(1, models)))
    draft.replace(path)


def routes(*workers: Worker, base: ModelRoutes = ROUTES) -> ModelRoutes:
    """The routes of workers of one model."""
    return replace(base, replicas=tuple(worker.row() for worker in workers))


@contextlib.asynccontextmanager
async def fronting(folder: Path, *models: ModelRoutes, id: str = "gateway-0", **more: Any) -> AsyncIterator[Front]:
    """Run a gateway over a snapshot of these models."""
    spec = GatewaySpec(
        id=id,
        generation=1,
        host="127.0.0.1",
        port=0,
        snapshot_path=str(folder / "snapshot.json"),
        endpoint_path=str(folder / f"{id}.endpoint"),
        peers_dir=str(folder / "peers"),
        **{"load_poll_s": 0.02, "replica_timeout_s": 5.0, **more},
    )
    if models:
        write_snapshot(Path(spec.snapshot_path), *models)
    signals: asyncio.Queue[int] = asyncio.Queue()
    access = io.BytesIO()
    path = Path(spec.endpoint_path)
    async with asyncio.TaskGroup() as group:
        done = group.create_task(run(spec, log.configure(io.StringIO()), AccessLog(access), signals, Random(1)))
        try:
            await until(lambda: path.exists() or done.done())
            port = msgspec.json.decode(path.read_bytes(), type=Endpoint).port
            yield Front(port, spec, signals, done, access)
        finally:
            signals.put_nowait(15)
            signals.put_nowait(15)


@contextlib.asynccontextmanager
async def cluster(folder: Path, *workers: Worker, base: ModelRoutes = ROUTES, **more: Any) -> AsyncIterator[Front]:
    """Workers of one model behind a ready gateway."""
    async with working(*workers), fronting(folder, routes(*workers, base=base), **more) as front:
        await front.ready()
        yield front


def closed_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def read_until(client: Peer, mark: bytes) -> bytes:
    """Read raw bytes up to a mark."""
    async with asyncio.timeout(10):
        return await client.reader.readuntil(mark)


def error_code(answer: Answer) -> str:
    """The code of an error answer."""
    return str(msgspec.json.decode(answer.body)["error"]["code"])


Condition = Callable[[], bool]
