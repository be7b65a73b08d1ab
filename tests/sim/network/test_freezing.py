"""A stopped process does nothing, and later continues as if nothing had happened, except for the clock."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from tests.sim.network.recording_protocol import HOST, PORT, End, on
from tests.sim.virtual import elapse

from forebay.sim.network.network import Network


def now() -> float:
    return asyncio.get_running_loop().time()


async def tick(told: list[float]) -> None:
    """Every second."""
    while True:
        told.append(now())
        await asyncio.sleep(1.0)


def with_two(
    scenario: Callable[[Network, dict[str, list[float]], dict[str, asyncio.Task[None]]], Awaitable[Any]],
) -> Any:
    """Two processes that tick."""
    network = Network(Random(1))

    async def main() -> Any:
        told: dict[str, list[float]] = {"a": [], "b": []}
        tasks = {}
        for node, times in told.items():
            with network.node(node):
                tasks[node] = asyncio.get_running_loop().create_task(tick(times))
        found = await scenario(network, told, tasks)
        for task in tasks.values():
            task.cancel()
        return found

    return on(network, main)


def test_frozen_process_runs_due_timers_once_after_thawing() -> None:
    async def scenario(network: Network, told: dict[str, list[float]], tasks: object) -> dict[str, list[float]]:
        await elapse(1.5)
        network.freeze("a")
        await elapse(3.0)
        network.thaw("a")
        await elapse(2.0)
        return told

    assert with_two(scenario) == {"a": [0.0, 1.0, 4.5, 5.5], "b": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}


def test_two_stopped_processes_continue_independently() -> None:
    async def scenario(network: Network, told: dict[str, list[float]], tasks: object) -> dict[str, list[float]]:
        await elapse(0.5)
        network.freeze("a")
        network.freeze("b")
        await elapse(2.0)
        network.thaw("b")
        await elapse(0.1)
        assert len(told["a"]) == 1
        network.thaw("a")
        await elapse(0.1)
        return told

    assert with_two(scenario) == {"a": [0.0, 2.6], "b": [0.0, 2.5]}


def test_stopped_process_can_be_killed() -> None:
    async def scenario(network: Network, told: dict[str, list[float]], tasks: dict[str, asyncio.Task[None]]) -> bool:
        network.freeze("a")
        await elapse(2.0)
        tasks["a"].cancel()
        await elapse(1.0)
        assert not tasks["a"].done()
        network.kill("a")
        await elapse(0.1)
        return tasks["a"].cancelled()

    assert with_two(scenario) is True


def test_continuing_a_running_process_changes_nothing() -> None:
    async def scenario(network: Network, told: dict[str, list[float]], tasks: object) -> dict[str, list[float]]:
        network.thaw("a")
        await elapse(1.5)
        return told

    assert with_two(scenario) == {"a": [0.0, 1.0], "b": [0.0, 1.0]}


def test_stopped_process_keeps_connections_and_clients_wait() -> None:
    network = Network(Random(1))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    def protocol() -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader()
        return asyncio.StreamReaderProtocol(reader, serve)

    async def main() -> tuple[list[object], list[float]]:
        loop, client = asyncio.get_running_loop(), End()
        with network.node("server"):
            await loop.create_server(protocol, HOST, PORT)
        with network.node("client"):
            await loop.create_connection(lambda: client, HOST, PORT)
        await elapse(1.0)
        network.freeze("server")
        client.transport.write(b"hello\n")
        await elapse(5.0)
        heard = [float(client.received_bytes)]
        network.thaw("server")
        await elapse(0.1)
        heard.append(float(client.received_bytes))
        client.transport.close()
        await elapse(0.1)
        return client.told, heard

    told, heard = on(network, main)
    assert heard == [0.0, 6.0]
    assert told == ["made", "data", "lost"]


def test_cancelled_connect_leaves_no_connection_behind() -> None:
    network = Network(Random(1))

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        with network.node("server"):
            await loop.create_server(End, HOST, PORT)
        left = []
        for turns in range(8):
            connecting = loop.create_task(loop.create_connection(End, HOST, PORT))
            for _ in range(turns):
                await asyncio.sleep(0)
            connecting.cancel()
            await asyncio.wait([connecting])
            await elapse(0.5)
            left.append(network.connections - (not connecting.cancelled()))
            if not connecting.cancelled():
                connecting.result()[0].abort()
            await elapse(0.5)
        return left

    assert on(network, main) == [0] * 8
