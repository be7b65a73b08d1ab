"""Nodes through the admin API: drains record the caller, and rejections have a reason."""

import asyncio
from pathlib import Path

import httpx
from tests.control.api.rig import IdleControl, services
from tests.control.health.test_health import Rig, unit

from forebay.control.api.app import make_app


def test_drain_and_undrain_record_the_caller_and_explain_rejections(tmp_path: Path) -> None:
    async def test() -> None:
        rig, idle = Rig(), IdleControl(tmp_path)
        idle.control.health = health = rig.health()
        await health.begin()
        health.condemned([unit("chat-0", "gpu-0")])
        transport = httpx.ASGITransport(make_app(services(idle, tmp_path)))
        async with asyncio.timeout(20), httpx.AsyncClient(transport=transport, base_url="http://admin") as client:

            async def said(path: str, **body: object) -> tuple[int, str]:
                answer = await client.post(f"/v1/nodes/{path}", json=body)
                return answer.status_code, answer.text

            [node] = (await client.get("/v1/nodes")).json()["nodes"]
            assert (node["name"], node["replicas"], node["devices"][0]["replicas"]) == (
                "local",
                ["chat-0"],
                ["chat-0"],
            )
            status, text = await said("local/drain", why="fans")
            assert status == 409
            assert "chat-0: there is no other node that serves" in text
            status, text = await said("local/drain", why="fans", force=True)
            assert (status, health.excluded.nodes) == (200, {"local": "drained by ada: fans"})
            assert (await said("local/undrain", device="gpu-0"))[0] == 409
            assert (await said("local/undrain", device="gpu-9"))[0] == 404
            assert (await said("local/undrain"))[0] == 200
            assert (await said("none/drain"))[0] == 404
            assert (await said("local/drain", soon=True))[0] == 400
            assert health.excluded.nodes == {}
            idle.control.health = None
            assert (await client.get("/v1/nodes")).status_code == 409
        idle.journal.close()

    asyncio.run(test())
