"""Listeners on the simulated network, distribution of connections, and the node of each callback."""

import asyncio
from functools import partial
from random import Random
from typing import Any

import pytest
from tests.sim.network.recording_protocol import HOST, PORT, End, on
from tests.sim.virtual import elapse

from forebay.sim.network import listening
from forebay.sim.network.network import Network
from forebay.sim.network.transport import Transport


def test_free_ports_are_sequential_and_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "FREE_PORTS", range(5000, 5003))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(End, HOST, 5000)
        servers = [await loop.create_server(End, HOST, 0) for _ in range(3)]
        assert [each.sockets[0].getsockname()[1] for each in servers] == [5000, 5001, 5002]
        with pytest.raises(OSError, match="no free port"):
            await loop.create_server(End, HOST, 0)
        servers[1].close()
        again = await loop.create_server(End, HOST, 0)
        assert again.sockets[0].getsockname()[1] == 5001

    on(Network(Random(1)), main)


def test_listeners_of_one_port_share_the_connections() -> None:
    network = Network(Random(1))
    servers: dict[str, list[End]] = {"one": [], "two": []}

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def accept(name: str) -> End:
            end = End()
            servers[name].append(end)
            return end

        for name in servers:
            with network.node(name):
                await loop.create_server(partial(accept, name), "0.0.0.0", PORT, reuse_port=True)
        with pytest.raises(OSError, match="in use"):
            await loop.create_server(End, HOST, PORT)
        for _ in range(40):
            await loop.create_connection(End, "localhost", PORT)
        await elapse(1)
        assert all(len(ends) > 10 for ends in servers.values())
        network.kill("one")
        for _ in range(10):
            await loop.create_connection(End, "::1", PORT)
        await elapse(1)
        assert sum(map(len, servers.values())) == 50

    on(network, main)


def test_ports_are_separate_for_each_host() -> None:
    network = Network(Random(1))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        first = await loop.create_server(End, "10.0.0.1", PORT)
        second = await loop.create_server(End, "10.0.0.2", PORT)
        free = [await loop.create_server(End, None, 0) for _ in range(3)]
        assert len({each.sockets[0].getsockname() for each in (first, second, *free)}) == 5
        assert first.get_loop() is loop
        await first.start_serving()
        first.close()
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(End, "10.0.0.1", PORT)
        await loop.create_connection(End, "10.0.0.2", PORT)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await second.serve_forever()

    on(network, main)


def test_callbacks_and_tasks_inherit_the_node_they_run_on() -> None:
    network = Network(Random(1))
    nodes: list[str] = []
    tasks: list[asyncio.Task[Any]] = []

    class Onward(End):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, Transport)
            nodes.append(transport.node)

        def data_received(self, data: bytes) -> None:
            loop = asyncio.get_running_loop()
            tasks.append(loop.create_task(loop.create_connection(Onward, HOST, PORT + 1)))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for port in (PORT, PORT + 1):
            with network.node(f"server-{port}"):
                await loop.create_server(Onward, HOST, port)
        with network.node("client"):
            transport, _ = await loop.create_connection(Onward, HOST, PORT)
        transport.write(b"go on")
        await elapse(1)

    on(network, main)
    assert sorted(nodes) == ["client", "server-8100", "server-8100", "server-8101"]


def test_unsimulated_network_features_raise() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"sock": object()}
        with pytest.raises(ValueError, match="`ssl` is not simulated"):
            await loop.create_server(End, HOST, PORT, ssl=True)
        with pytest.raises(ValueError, match="listening later"):
            await loop.create_server(End, HOST, PORT, start_serving=False)
        with pytest.raises(ValueError, match="`sock` is not simulated"):
            await loop.create_connection(End, HOST, PORT, **options)

    on(Network(Random(1)), main)
