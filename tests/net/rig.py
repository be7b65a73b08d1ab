"""Small raw peers for the HTTP tests: a client that sends bytes as they are, and ways to wait for a condition."""

import asyncio
import contextlib
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

from forebay.core.model import Limits
from forebay.net.client import CallError, Header, Pool
from forebay.net.connection import Connection
from forebay.net.server import Exchange, Handler, HttpServer

PATIENCE_S = 10.0
HANG_S = 90.0
"""No test takes so long: it hangs."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test on the loop that the product uses."""

    async def bounded() -> None:
        asyncio.get_running_loop().call_later(HANG_S, _show_tasks)
        async with asyncio.timeout(HANG_S):
            await main

    uvloop.run(bounded())


def _show_tasks() -> None:
    """Print where each task waits: if a cleanup waits too, the test never fails with its own traceback."""
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.__stderr__)


async def until(condition: Callable[[], bool]) -> None:
    """Wait, within bounds, until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def serving(handler: Handler, limits: Limits = Limits(), **more: Any) -> AsyncIterator[HttpServer]:  # noqa: B008
    """A server on a free port."""
    server = HttpServer(handler, limits, **more)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        server.close()
        await until(lambda: server.connections == 0)


def lone(method: bytes, target: bytes, fields: dict[bytes, bytes] | None = None) -> Exchange:
    """A request on a connection that nothing is ever read from, or written to."""
    fields = fields or {}
    return Exchange(Connection(HttpServer(print, Limits())), method, target, list(fields.items()), fields)


@dataclass
class Answer:
    """A parsed answer."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    trailers: dict[bytes, bytes] = field(default_factory=dict)


class Told:
    """A source of answers that notes what it is told."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


class Peer:
    """A client that writes raw bytes and reads answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, head: bool = False) -> Answer:
        """The next answer; IncompleteReadError if the connection ends inside it."""
        async with asyncio.timeout(PATIENCE_S):
            text = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = text[:-4].split(b"\r\n")
            headers = _pairs(lines)
            status = int(first.split(b" ")[1])
            if head or status in {100, 204, 304}:
                return Answer(status, headers, b"")
            if b"content-length" in headers:
                return Answer(status, headers, await self.reader.readexactly(int(headers[b"content-length"])))
            if b"transfer-encoding" in headers:
                body, trailers = await self._chunked()
                return Answer(status, headers, body, trailers)
            return Answer(status, headers, await self.reader.read())

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionResetError):
                return await self.reader.read()
            return b""

    async def _chunked(self) -> tuple[bytes, dict[bytes, bytes]]:
        body = b""
        while True:
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            if size == 0:
                lines = []
                while (line := (await self.reader.readuntil(b"\r\n"))[:-2]) != b"":
                    lines.append(line)
                return body, _pairs(lines)
            body += (await self.reader.readexactly(size + 2))[:-2]


def _pairs(lines: list[bytes]) -> dict[bytes, bytes]:
    pairs = (line.split(b":", 1) for line in lines)
    return {name.lower(): value.strip() for name, value in pairs}


@contextlib.asynccontextmanager
async def peer(port: int, *, receive_bytes: int | None = None) -> AsyncIterator[Peer]:
    """A raw connection to a local port; `receive_bytes` makes its socket buffer small."""
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or 65_536)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def pooling(port: int, **more: Any) -> AsyncIterator[Pool]:
    """A pool of connections to a local port."""
    async with asyncio.TaskGroup() as group:
        pool = Pool("127.0.0.1", port, group, **more)
        try:
            yield pool
        finally:
            pool.close()
            await until(lambda: pool.connections == 0)


class Script:
    """An upstream that answers the n-th read of a connection with the n-th prepared bytes; None closes it."""

    def __init__(self, *connections: list[bytes | None]) -> None:
        self.connections = connections
        self.accepted = 0
        self.open = 0
        self.reads: list[bytes] = []


class _Scripted(asyncio.Protocol):
    def __init__(self, script: Script) -> None:
        self._script = script
        self._steps: list[bytes | None] = []
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        script = self._script
        self._steps = list(script.connections[min(script.accepted, len(script.connections) - 1)])
        script.accepted += 1
        script.open += 1

    def data_received(self, data: bytes) -> None:
        self._script.reads.append(data)
        if self._steps and (step := self._steps.pop(0)) is not None:
            self._transport.write(step)
        if self._steps and self._steps[0] is None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._script.open -= 1


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[int]:
    """Run a script on a free port."""
    server = await asyncio.get_running_loop().create_server(lambda: _Scripted(script), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await until(lambda: script.open == 0)


@dataclass
class Log:
    """A sink that keeps what it is told."""

    status: int = 0
    headers: list[Header] = field(default_factory=list)
    body: bytes = b""
    trailers: list[Header] | None = None
    error: CallError | None = None

    def on_head(self, status: int, headers: list[Header]) -> None:
        assert self.status == 0
        assert not self.done
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        assert self.status
        assert not self.done
        self.body += data

    def on_end(self, trailers: list[Header]) -> None:
        assert not self.done
        self.trailers = trailers

    def on_error(self, error: CallError) -> None:
        assert not self.done
        self.error = error

    @property
    def done(self) -> bool:
        return self.trailers is not None or self.error is not None


def echo(exchange: Exchange) -> None:
    """Answer with what arrived."""
    text = b"%b %b %d %b" % (exchange.method, exchange.target, len(exchange.body), exchange.body)
    exchange.respond(200, [(b"content-type", b"text/plain")], text)


def get(target: bytes = b"/", *fields: bytes) -> bytes:
    """A GET request."""
    return b"GET %b HTTP/1.1\r\nhost: a\r\n%b\r\n" % (target, b"".join(f + b"\r\n" for f in fields))


def post(body: bytes, *fields: bytes, target: bytes = b"/") -> bytes:
    """A POST request with its length."""
    lines = b"".join(f + b"\r\n" for f in fields)
    return b"POST %b HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n%b" % (target, lines, len(body), body)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
