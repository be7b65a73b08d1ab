"""Rollouts through the admin API: the real deployments, over units in memory and a real store, on virtual time."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.control.api.rig import FakeReloader, FixedCaller, catalogue
from tests.control.deploying.rig import Rig, controlled, inline, play
from tests.control.deploying.world import NEW, OLD, FaultyStore, World

from forebay.control.api.app import make_app
from forebay.control.api.services import Services
from forebay.control.journal import Journal
from forebay.core.deploy.rollout import Phase
from forebay.core.registry.approval import Role
from forebay.core.tenancy.roles import Caller
from forebay.obs.metrics import Metrics

PLAN = "steps: [{share: 0.2, time_s: 120}, {share: 0.5, time_s: 120}]\nwarm_up_s: 2\nsettle_s: 10\n"
Test = Callable[[Rig, httpx.AsyncClient], Awaitable[None]]


@asynccontextmanager
async def served(rig: Rig, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    journal = Journal(folder / "api.log", lambda event: None)
    caller = FixedCaller(Caller("bob", Role.OPERATOR))
    parts = Services(rig.control, journal, Metrics(), FakeReloader(), catalogue(folder), caller, inline)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(parts)), base_url="http://admin/v1"
    ) as client:
        yield client
    journal.close()


def tried(folder: Path, test: Test) -> None:
    async def story(world: World) -> None:
        world.requests_per_s = 20.0
        async with controlled(world) as rig:
            await rig.ready()
            async with served(rig, folder) as client:
                await test(rig, client)

    play(folder, story)


async def deployed(client: httpx.AsyncClient, **body: object) -> dict[str, Any]:
    answer = await client.post("/models/chat/deploy", json={"revision": "new", "plan": PLAN, "why": "faster", **body})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_rollout_steps_are_reported_and_record_the_caller(tmp_path: Path) -> None:
    async def test(rig: Rig, client: httpx.AsyncClient) -> None:
        begun = await deployed(client)
        assert (begun["id"], begun["stable"], begun["canary"]) == ("chat:1", OLD, NEW)
        assert (begun["phase"], begun["share"], begun["created_by"], begun["ended"]) == (
            "starting",
            0.0,
            "bob",
            False,
        )
        assert [(step["share"], step["time_s"]) for step in begun["steps"]] == [(0.2, 120.0), (0.5, 120.0)]

        await rig.reaches(Phase.COMPARING)
        now = (await client.get("/rollouts/chat:1")).json()
        assert (now["phase"], now["share"], now["step"]) == ("comparing", 0.2, 0)
        assert (now["stable_ready"], now["canary_ready"]) == (3, 1)
        assert 0 < now["time_left_s"] <= 120
        assert {each["metric"] for each in now["verdict"]["findings"]} >= {"errors", "ttft"}
        assert (await client.get("/rollouts")).json()["rollouts"][0]["id"] == "chat:1"

        for _ in range(2):
            assert (await client.post("/rollouts/chat:1/promote", json={"why": "sure"})).status_code == 200
            await rig.until(lambda: not rig.standing.rollout.forced)
        await rig.reaches(Phase.PROMOTED)
        [past] = (await client.get("/rollouts?ended=true")).json()["rollouts"]
        assert (past["phase"], past["ended"], past["time_left_s"]) == ("promoted", True, None)
        assert past == (await client.get("/rollouts/chat:1")).json()
        assert (await client.get("/rollouts?ended=false")).json() == {"rollouts": []}
        again = await deployed(client, revision="old", unchecked=True)
        assert (await client.get("/rollouts?ended=true&last=1")).json()["rollouts"] == [past]
        for query, ids in (("model=chat&ended=true", ["chat:1"]), ("ended=false&last=1", [again["id"]])):
            found = (await client.get(f"/rollouts?{query}")).json()["rollouts"]
            assert [each["id"] for each in found] == ids
        for query in ("", "&ended=true", "&ended=false"):
            answer = await client.get(f"/rollouts?model=nochat{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
            assert "there is: chat" in answer.text

    tried(tmp_path, test)


def test_rollout_can_be_paused_resumed_and_aborted(tmp_path: Path) -> None:
    async def test(rig: Rig, client: httpx.AsyncClient) -> None:
        assert (await client.post("/rollouts/chat:1/abort")).status_code == 404
        await deployed(client)
        again = await client.post("/models/chat/deploy", json={"revision": "newer", "unchecked": True})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
        assert "chat:1" in again.text
        await rig.reaches(Phase.COMPARING)
        paused = (await client.post("/rollouts/chat:1/pause", json={"why": "lunch"})).json()
        assert (paused["paused"], paused["time_left_s"]) == (True, None)
        assert "lunch" in paused["why"]
        assert (await client.post("/rollouts/chat:1/resume")).json()["paused"] is False
        ended = (await client.post("/rollouts/chat:1/abort", json={"why": "enough"})).json()
        assert (ended["phase"], ended["share"], ended["ended"]) == ("rolled_back", 0.0, True)
        assert (await client.post("/rollouts/chat:1/pause")).status_code == 409
        assert (await client.get("/rollouts/chat:9")).status_code == 404

    tried(tmp_path, test)


def test_invalid_deploy_is_rejected_with_the_reason(tmp_path: Path) -> None:
    async def test(rig: Rig, client: httpx.AsyncClient) -> None:
        for body, param in (({"revision": "none"}, "revision"), ({"revision": "old"}, "revision")):
            answer = await client.post("/models/chat/deploy", json={**body, "plan": PLAN})
            assert (answer.status_code, answer.json()["error"]["param"]) == (409, param), answer.text
        blue = await deployed(client, plan="blue-green")
        assert (blue["kind"], blue["steps"]) == ("blue-green", [])

    tried(tmp_path, test)


def test_store_outage_rejects_commands_but_shows_the_current_rollout(tmp_path: Path) -> None:
    async def test(rig: Rig, client: httpx.AsyncClient) -> None:
        store = rig.world.store
        assert isinstance(store, FaultyStore)
        await deployed(client)
        await rig.reaches(Phase.COMPARING)
        store.down = "the disk is gone"
        refused = await client.post("/rollouts/chat:1/pause")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert "the disk is gone" in refused.text
        assert (await client.get("/rollouts/chat:1")).json()["paused"] is False
        assert (await client.get("/rollouts?ended=true")).status_code == 503

    tried(tmp_path, test)
