"""Protocols that record their callbacks, and the three kinds of connections to test them on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, cast

import uvloop

from forebay.sim.loop import run
from forebay.sim.network.network import Network

HOST = "127.0.0.1"
PORT = 8100
PATIENCE_S = 10.0


class End(asyncio.Protocol):
    """Keeps what it is told in `told`: bytes that follow one another as one entry, errors by their class."""

    def __init__(self, *, keeps_open: bool = False, echoes: bool = False) -> None:
        self.told: list[object] = []
        self.keeps_open = keeps_open
        self.echoes = echoes
        self.transport: asyncio.Transport
        self.received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.told.append("made")

    def data_received(self, data: bytes) -> None:
        assert data
        assert isinstance(data, bytes)
        self.received_bytes += len(data)
        if self.told[-1] != "data":
            self.told.append("data")
        if self.echoes:
            self.transport.write(data)

    def eof_received(self) -> bool:
        self.told.append("eof")
        return self.keeps_open

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append(type(exc).__name__ if exc else "lost")

    @property
    def lost(self) -> bool:
        return self.told[-1:] in (["lost"], ["ConnectionResetError"], ["BrokenPipeError"])


async def until(condition: Callable[[], bool]) -> None:
    """Wait, within bounds, until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def settle() -> None:
    """Let what was sent on other connections arrive: a message goes there and back on one of its own."""
    client, server = End(), End(echoes=True)
    async with joined(client, server):
        client.transport.write(b"x")
        await until(lambda: client.received_bytes == 1)
        client.transport.close()


@asynccontextmanager
async def joined(client: End, server: End) -> AsyncIterator[None]:
    """Connect them; at the end wait until both have lost the connection."""
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: server, HOST, 0)
    port = listening.sockets[0].getsockname()[1]
    await loop.create_connection(lambda: client, HOST, port)
    await until(lambda: bool(server.told))
    try:
        yield
        await until(lambda: client.lost and server.lost)
    finally:
        if not client.lost:
            client.transport.abort()
        listening.close()


Scenario = Callable[[], Awaitable[Any]]


def on_asyncio(scenario: Scenario) -> Any:
    """Over real sockets, with the loop of the standard library."""

    async def main() -> Any:
        return await scenario()

    return asyncio.run(main())


def on_uvloop(scenario: Scenario) -> Any:
    """Over real sockets, with the loop of the product."""

    async def main() -> Any:
        return await scenario()

    return uvloop.run(main())


def on(network: Network, scenario: Scenario) -> Any:
    """Over this simulated network."""

    async def main() -> Any:
        return await scenario()

    return run(main(), seconds_max=3600, network=network)


def in_memory(scenario: Scenario) -> Any:
    """Over a simulated network."""
    return on(Network(Random(3)), scenario)


def in_pieces(scenario: Scenario) -> Any:
    """Over a simulated network that hands everything on in pieces."""
    return on(Network(Random(3), chop=True), scenario)
