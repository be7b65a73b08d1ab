"""The HTTP server's connection limit: eviction of idle connections, handshakes that count, accepts at shutdown."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any, cast

import pytest
from tests.net.certificates import issue, tls_peer, trusting, write
from tests.net.rig import Peer, echo, get, peer, run, serving, until

from forebay.core.errors import Code
from forebay.core.model import Limits
from forebay.net.server import Exchange, HttpServer
from forebay.net.tls import load

CROWD = 100
BUSY_SWEEPS = 0.2
"""As a write timeout: the server sweeps twenty times a second."""


async def swept(server: HttpServer) -> None:
    """Wait for the next sweep."""
    before = server.common.now
    await until(lambda: server.common.now > before)


@pytest.mark.parametrize("part", [b"", b"GET / HT", get()])
def test_longest_idle_connection_is_evicted_for_a_new_one(part: bytes) -> None:
    async def main() -> None:
        limits = Limits(connections_max=2, write_timeout_s=BUSY_SWEEPS)
        async with serving(echo, limits) as server, contextlib.AsyncExitStack() as stack:
            idle: list[Peer] = []
            for _ in range(2):
                idle.append(await stack.enter_async_context(peer(server.port)))
                idle[-1].send(part)
                if part == get():
                    assert (await idle[-1].answer()).status == 200
                await until(lambda: server.connections == len(idle))
                await swept(server)
            async with peer(server.port) as third:
                third.send(get())
                assert (await third.answer()).status == 200
                assert await idle[0].rest() == b""
                assert server.connections == 2
                idle[1].send(get()[len(part) :] if part != get() else get())
                assert (await idle[1].answer()).status == 200

    run(main())


def test_busy_and_new_connections_are_not_evicted() -> None:
    waiting: list[Exchange] = []

    async def main() -> None:
        async with serving(waiting.append, Limits(connections_max=2)) as server, contextlib.AsyncExitStack() as stack:
            busy, fresh = [await stack.enter_async_context(peer(server.port)) for _ in range(2)]
            busy.send(get())
            await until(lambda: bool(waiting) and server.connections == 2)
            server.common.now = 0.0  # as if it had swept before they came
            refused = [await stack.enter_async_context(peer(server.port)) for _ in range(3)]
            for client in refused:
                assert (await client.answer()).status == 503
            waiting[0].respond(200, [], b"")
            assert (await busy.answer()).status == 200
            fresh.send(get())
            await until(lambda: len(waiting) == 2)
            waiting[1].respond(200, [], b"")
            assert (await fresh.answer()).status == 200

    run(main())


def test_handshakes_count_as_connections(tmp_path: Path) -> None:
    refused: list[Code] = []

    async def main() -> None:
        server = HttpServer(echo, Limits(connections_max=2, head_timeout_s=60.0), refused=refused.append)
        await server.start("127.0.0.1", 0, tls=load(write(tmp_path, issue())).context)
        async with contextlib.AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(peer(server.port)) for _ in range(2)]
            await until(lambda: server.connections == 2)
            async with peer(server.port) as third:
                assert await third.rest() == b""
            assert refused == [Code.CONNECTION_LIMIT]
            silent[0].writer.transport.abort()
            await until(lambda: server.connections == 1)
            async with tls_peer(server.port) as client:
                client.send(get())
                assert (await client.answer()).status == 200
                assert server.connections == 2
        assert await server.drain(10)
        server.close()

    run(main())


def test_handshakes_end_with_their_server(tmp_path: Path) -> None:
    async def main() -> None:
        server = HttpServer(echo, Limits(head_timeout_s=60.0))
        await server.start("127.0.0.1", 0, tls=load(write(tmp_path, issue())).context)
        async with peer(server.port) as silent:
            await until(lambda: server.connections == 1)
            server.close()
            assert await silent.rest() == b""
            await until(lambda: server.connections == 0)

    run(main())


@pytest.mark.parametrize("https", [False, True])
def test_connections_in_the_accept_backlog_are_served_at_shutdown(tmp_path: Path, https: bool) -> None:
    async def main() -> None:
        server = HttpServer(echo, Limits())
        context = load(write(tmp_path, issue())).context if https else None
        await server.start("127.0.0.1", 0, tls=context)
        socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]  # the loop has no turn here
        async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
            drained = group.create_task(server.drain(10, linger_s=5.0))
            for sock in socks:
                client = await stack.enter_async_context(adopted(sock, https))
                client.send(get())
                assert (await client.answer()).headers[b"connection"] == b"close"
            assert await drained
        server.close()

    run(main())


@pytest.mark.parametrize("places", [1000, 8])
def test_burst_of_connections_is_accepted_within_a_few_loop_iterations(places: int) -> None:
    refused: list[Code] = []

    async def main() -> None:
        async with (
            serving(echo, Limits(connections_max=places), refused=refused.append) as server,
            contextlib.AsyncExitStack() as stack,
        ):
            for _ in range(CROWD):  # the loop has no turn here
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            rounds = 0
            while server.connections < CROWD:
                await asyncio.sleep(0)
                rounds += 1
            assert rounds < CROWD // 2
            await until(lambda: len(refused) == max(0, CROWD - places))

    run(main())


@contextlib.asynccontextmanager
async def adopted(sock: socket.socket, https: bool) -> Any:
    """A client on a socket that is connected already."""
    more: dict[str, Any] = {"ssl": trusting(), "server_hostname": "localhost"} if https else {}
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock, **more)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


@pytest.mark.interpreted
def test_exception_in_one_sweep_does_not_stop_the_timer() -> None:
    told: list[str] = []

    class Wrong:
        """A connection that cannot be swept."""

        def __init__(self, server: HttpServer) -> None:
            self.server = server

        def sweep(self, now: float) -> None:
            raise RuntimeError("a mistake")

        def abort(self) -> None:
            self.server.closed(cast(Any, self))

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        async with serving(echo, Limits(idle_timeout_s=0.2)) as server:
            server._connections[cast(Any, Wrong(server))] = None
            async with peer(server.port) as client:
                assert await client.rest() == b""
        assert told == ["sweeping a connection failed"]

    run(main())
