"""One suite for real and simulated sockets: protocols get the same callbacks in the same order."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.sim.network.recording_protocol import (
    HOST,
    End,
    Scenario,
    in_memory,
    in_pieces,
    joined,
    on_asyncio,
    on_uvloop,
    settle,
    until,
)

MUCH = b"x" * 20_000_000
"""More than any kernel takes at once."""
Told = tuple[list[object], list[object]]
Place = Callable[[Scenario], Any]


@pytest.fixture(params=[on_asyncio, on_uvloop, in_memory, in_pieces])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


async def echo() -> Told:
    client, server = End(), End(echoes=True)
    async with joined(client, server):
        client.transport.write(b"hello")
        client.transport.writelines([b" ", bytearray(b"wor"), memoryview(b"ld")])
        client.transport.write(b"")
        await until(lambda: client.received_bytes == len("hello world"))
        client.transport.close()
        assert client.transport.is_closing()
        client.transport.close()
    return client.told, server.told


async def half_close() -> Told:
    client, server = End(), End(keeps_open=True)
    async with joined(client, server):
        assert client.transport.can_write_eof()
        client.transport.write(b"question")
        client.transport.write_eof()
        client.transport.write_eof()
        with pytest.raises(RuntimeError, match="after write_eof"):
            client.transport.write(b"more")
        await until(lambda: "eof" in server.told)
        server.transport.write(b"answer")
        server.transport.close()
    assert (client.received_bytes, server.received_bytes) == (6, 8)
    return client.told, server.told


async def half_close_behind_much() -> Told:
    client, server = End(), End()
    async with joined(client, server):
        client.transport.write(MUCH)
        client.transport.write_eof()
    assert server.received_bytes == len(MUCH)
    return client.told, server.told


async def abort() -> Told:
    client, server = End(), End()
    async with joined(client, server):
        client.transport.abort()
        client.transport.abort()
        client.transport.write(b"into the void")
    return client.told, server.told


async def close_over_much() -> Told:
    client, server = End(), End()
    async with joined(client, server):
        client.transport.write(MUCH)
        client.transport.close()
        assert client.transport.is_closing()
        assert client.transport.get_write_buffer_size() > 0
    assert server.received_bytes == len(MUCH)
    return client.told, server.told


async def abort_over_much() -> Told:
    client, server = End(), End()
    async with joined(client, server):
        server.transport.pause_reading()
        client.transport.write(MUCH)
        await until(lambda: "pause" in client.told)
        client.transport.abort()
        server.transport.resume_reading()
    assert 0 < server.received_bytes < len(MUCH)
    return client.told, server.told


async def reading_paused() -> Told:
    client, server = End(), End()
    async with joined(client, server):
        server.transport.pause_reading()
        assert not server.transport.is_reading()
        client.transport.write(MUCH)
        await until(lambda: "pause" in client.told)
        assert client.transport.get_write_buffer_size() > 1_000_000
        assert server.told == ["made"]
        server.transport.resume_reading()
        assert server.transport.is_reading()
        await until(lambda: "resume" in client.told)
        await until(lambda: server.received_bytes == len(MUCH))
        assert client.transport.get_write_buffer_size() == 0
        client.transport.close()
    return client.told, server.told


async def end_while_paused() -> Told:
    client, server = End(), End()
    async with joined(client, server):
        server.transport.pause_reading()
        client.transport.write(b"last words")
        client.transport.close()
        await until(lambda: client.lost)
        await settle()
        assert server.told == ["made"]
        server.transport.resume_reading()
    assert server.received_bytes == 10
    return client.told, server.told


async def close_over_unread_bytes() -> Told:
    client, server = End(), End()
    async with joined(client, server):
        server.transport.pause_reading()
        client.transport.write(b"unread")
        await settle()
        server.transport.close()
    return client.told, server.told


async def write_to_one_who_is_gone() -> Told:
    client, server = End(keeps_open=True), End()
    async with joined(client, server):
        server.transport.close()
        await until(lambda: "eof" in client.told)
        client.transport.write(b"anybody there?")
        await settle()
        client.transport.write(b"hello?")
    return client.told, server.told


async def write_after_close() -> Told:
    client, server = End(), End()
    async with joined(client, server):
        client.transport.close()
        client.transport.write(b"too late")
    assert server.received_bytes == 0
    return client.told, server.told


SCENARIOS: list[tuple[Callable[[], Awaitable[Told]], str, str]] = [
    (echo, "made data lost", "made data eof lost"),
    (half_close, "made data eof lost", "made data eof lost"),
    (half_close_behind_much, "made pause resume eof lost", "made data eof lost"),
    (abort, "made lost", "made eof lost"),
    (close_over_much, "made pause resume lost", "made data eof lost"),
    (abort_over_much, "made pause lost", "made data eof lost"),
    (reading_paused, "made pause resume lost", "made data eof lost"),
    (end_while_paused, "made lost", "made data eof lost"),
    (close_over_unread_bytes, "made ConnectionResetError", "made lost"),
    (write_to_one_who_is_gone, "made eof BrokenPipeError", "made lost"),
    (write_after_close, "made lost", "made eof lost"),
]


@pytest.mark.parametrize(("scenario", "client", "server"), SCENARIOS, ids=[s.__name__ for s, _, _ in SCENARIOS])
def test_simulated_transports_call_back_like_real_sockets(
    place: Place, scenario: Scenario, client: str, server: str
) -> None:
    assert place(scenario) == (client.split(), server.split())


def test_write_buffer_limits_pause_and_resume_writing(place: Place) -> None:
    async def scenario() -> Told:
        client, server = End(), End()
        async with joined(client, server):
            transport = client.transport
            transport.set_write_buffer_limits(high=100)
            assert transport.get_write_buffer_limits() == (25, 100)
            transport.set_write_buffer_limits(low=100)
            assert transport.get_write_buffer_limits() == (100, 400)
            with pytest.raises(ValueError, match="must be >="):
                transport.set_write_buffer_limits(high=1, low=2)
            transport.set_write_buffer_limits(high=0)
            server.transport.pause_reading()
            transport.write(MUCH)
            await until(lambda: "pause" in client.told)
            server.transport.resume_reading()
            await until(lambda: "resume" in client.told)
            assert transport.get_write_buffer_size() == 0
            transport.close()
        return client.told, server.told

    assert place(scenario) == (["made", "pause", "resume", "lost"], ["made", "data", "eof", "lost"])


def test_closed_port_refuses_and_a_port_is_bound_once(place: Place) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        first = await loop.create_server(End, HOST, 0)
        port = first.sockets[0].getsockname()[1]
        assert first.is_serving()
        with pytest.raises(OSError, match="in use") as caught:
            await loop.create_server(End, HOST, port)
        assert caught.value.errno == errno.EADDRINUSE
        with pytest.raises(OSError, match="in use"):
            await loop.create_server(End, HOST, port, reuse_port=True)
        first.close()
        assert (first.is_serving(), len(first.sockets)) == (False, 0)
        await first.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(End, HOST, port)
        shared = [await loop.create_server(End, HOST, 0, reuse_port=True)]
        shared.append(await loop.create_server(End, HOST, shared[0].sockets[0].getsockname()[1], reuse_port=True))
        for each in shared:
            each.close()

    place(scenario)


def test_transport_reports_the_addresses_of_both_ends(place: Place) -> None:
    async def scenario() -> Told:
        client, server = End(), End()
        async with joined(client, server):
            ours, theirs = client.transport.get_extra_info, server.transport.get_extra_info
            assert ours("peername") == theirs("sockname")
            assert ours("sockname") == theirs("peername")
            assert ours("peername")[0] == HOST
            assert ours("nothing", "known") == "known"
            assert client.transport.get_protocol() is client
            client.transport.close()
        return client.told, server.told

    place(scenario)


def test_transport_rejects_writes_other_than_bytes(place: Place) -> None:
    async def scenario() -> Told:
        client, server = End(), End()
        async with joined(client, server):
            with pytest.raises(TypeError):
                client.transport.write("text")  # type: ignore[arg-type]
            client.transport.close()
        return client.told, server.told

    place(scenario)


def test_asyncio_streams_work_on_the_simulated_network(place: Place) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(line.upper())
        await writer.drain()
        writer.close()

    async def scenario() -> bytes:
        server = await asyncio.start_server(serve, HOST, 0)
        reader, writer = await asyncio.open_connection(HOST, server.sockets[0].getsockname()[1])
        writer.write(b"hello\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        server.close()
        return answer

    assert place(scenario) == b"HELLO\n"
