"""The gateway as a process: start, shared port, taken port, signals."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.gateway.rig import ROUTES, Worker, chat, events, post, routes, working, write_snapshot
from tests.net.rig import Peer, peer, run, until

from forebay.core.model import Endpoint, GatewaySpec

pytestmark = pytest.mark.slow


@dataclass
class Process:
    """A gateway process."""

    child: asyncio.subprocess.Process
    endpoint: Path
    errors: Path

    @property
    def port(self) -> int:
        return msgspec.json.decode(self.endpoint.read_bytes(), type=Endpoint).port

    async def status(self, path: bytes) -> int:
        async with peer(self.port) as client:
            client.send(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % path)
            return (await client.answer()).status

    async def ready(self) -> None:
        async with asyncio.timeout(20):
            while await self.status(b"/readyz") != 200:
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, id: str = "gateway-0", port: int = 0, launcher: tuple[str, ...] = ()
) -> AsyncIterator[Process]:
    """Start a gateway process; it is killed at the end if it still runs."""
    spec = GatewaySpec(
        id=id,
        generation=1,
        host="127.0.0.1",
        port=port,
        snapshot_path=str(folder / "snapshot.json"),
        endpoint_path=str(folder / f"{id}.endpoint"),
        peers_dir=str(folder / "peers"),
    )
    file, errors = folder / f"{id}.spec", folder / f"{id}.log"
    file.write_bytes(msgspec.json.encode(spec))
    with errors.open("wb") as sink:
        command = (*launcher, sys.executable, "-m", "forebay.gateway", str(file))
        child = await asyncio.create_subprocess_exec(*command, stderr=sink)
    process = Process(child, Path(spec.endpoint_path), errors)
    try:
        async with asyncio.timeout(30):
            while not process.endpoint.exists() and child.returncode is None:
                await asyncio.sleep(0.02)
        yield process
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@contextlib.asynccontextmanager
async def draining(folder: Path) -> AsyncIterator[tuple[Process, Worker, Peer]]:
    """A gateway process that was told to stop while a stream is in flight, its worker, and the stream's client."""
    worker = Worker(lambda _: None)
    async with working(worker):
        write_snapshot(folder / "snapshot.json", routes(worker))
        async with gateway(folder) as process:
            await process.ready()
            async with peer(process.port) as client:
                client.send(post(chat(stream=True)))
                await until(lambda: bool(worker.requests))
                process.child.send_signal(signal.SIGTERM)
                await until(lambda: b"draining" in process.errors.read_bytes())
                yield process, worker, client


def test_sigterm_lets_a_stream_finish_and_exits_with_zero(tmp_path: Path) -> None:
    async def main() -> None:
        async with draining(tmp_path) as (process, worker, client):
            events(worker.requests[0])
            assert (await client.answer()).body.endswith(b"data: [DONE]\n\n")
            assert await process.child.wait() == 0
            assert not list((tmp_path / "peers").iterdir())
            assert b"secret prompt" not in process.errors.read_bytes()

    run(main())


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with draining(tmp_path) as (process, _, _):
            process.child.send_signal(signal.SIGINT)
            async with asyncio.timeout(10):
                assert await process.child.wait() == 0

    run(main())


def test_processes_of_a_cluster_share_the_port_and_strangers_do_not(tmp_path: Path) -> None:
    async def main() -> None:
        write_snapshot(tmp_path / "snapshot.json", ROUTES)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        stranger = tmp_path / "stranger"
        stranger.mkdir()
        async with gateway(tmp_path, "gateway-0", port) as one, gateway(tmp_path, "gateway-1", port) as two:
            assert one.port == two.port == port
            assert await one.status(b"/livez") == 200
            async with gateway(stranger, "gateway-0", port) as third:
                assert await third.child.wait() == 1
                assert b"cannot listen on 127.0.0.1" in third.errors.read_bytes()
            one.child.send_signal(signal.SIGTERM)
            assert await one.child.wait() == 0
            assert await two.status(b"/livez") == 200

    run(main())


def test_idle_connections_leave_file_descriptors_for_requests(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker()
        async with working(worker), contextlib.AsyncExitStack() as idle:
            write_snapshot(tmp_path / "snapshot.json", routes(worker))
            async with gateway(tmp_path, launcher=("prlimit", "--nofile=200")) as process:
                await process.ready()
                for _ in range(250):
                    await idle.enter_async_context(peer(process.port))
                status = 0
                async with asyncio.timeout(20):
                    while status != 200:  # new connections are not closed for newer ones at once
                        with contextlib.suppress(EOFError, ConnectionError):
                            async with peer(process.port) as client:
                                client.send(post(chat()))
                                status = (await client.answer()).status
                assert b'"connections_max": 36' in process.errors.read_bytes()

    run(main())


def test_gateway_exits_with_a_clear_message_when_its_port_is_taken(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            async with gateway(tmp_path, port=sock.getsockname()[1]) as process:
                assert await process.child.wait() == 1
                assert b"Address already in use" in process.errors.read_bytes()

    run(main())


def test_invalid_gateway_specification_is_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        bad = tmp_path / "bad.json"
        bad.write_bytes(b"{}")
        for arguments in ([], [str(bad)], [str(tmp_path / "missing")]):
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "forebay.gateway", *arguments, stderr=asyncio.subprocess.PIPE
            )
            _, errors = await child.communicate()
            assert child.returncode == 2
            assert errors

    run(main())
