"""Many connections to the admin API."""

import asyncio
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.control.api.rig import IdleControl, services

from forebay.control.api import server as module
from forebay.control.api.app import make_app
from forebay.control.api.server import AdminServer
from forebay.control.ports import Taken, bind

MANY = 8


def test_idle_connections_make_room_for_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MAX", MANY)
    rig = IdleControl(tmp_path)
    listener = bind("127.0.0.1", 0)
    assert not isinstance(listener, Taken)
    listener.listen()
    port = listener.getsockname()[1]
    server = AdminServer(make_app(services(rig, tmp_path)))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.run_on(listener))
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MANY)]
            async with httpx.AsyncClient() as client:
                for _ in range(2):
                    assert (await client.get(f"http://127.0.0.1:{port}/livez")).status_code == 200
            for reader, _ in opened[: 2 * MANY]:
                with suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 10) == b""
            for _, writer in opened:
                writer.close()
            server.stop()

    asyncio.run(main())
    rig.journal.close()
