"""Scaling through the admin API: the real scaler, over units in memory, on virtual time."""

from pathlib import Path

from tests.control.api.test_rollouts import served
from tests.control.deploying.world import World
from tests.control.scaling.rig import Scaling, controlled, plan_of, play


def test_scaling_can_be_explained_and_set(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        await it.has(1)
        async with served(it.rig, tmp_path) as client:
            it.crowd.load = 8.0
            await it.has(4)
            [one] = (await client.get("/scaling")).json()["models"]
            assert (one["model"], one["mode"], one["policy"], one["replicas"]) == ("chat", "auto", "hpa", 4)
            assert (one["min"], one["max"], one["decisions"]) == (1, 6, [])
            whole = (await client.get("/scaling/chat")).json()
            assert [told["wanted"] for told in whole["decisions"] if told["wanted"] != told["before"]] == [4]
            assert whole["decision"] == whole["decisions"][-1]

            done = await client.put("/scaling/chat", json={"replicas": 2, "why": "a test"})
            assert (done.status_code, done.json()["mode"]) == (200, "set")
            assert done.json()["setting"]["by"] == "bob"
            await it.has(2)
            [model] = (await client.get("/status")).json()["models"]
            assert (model["least"], model["most"], model["wanted"], model["on_demand"]) == (1, 6, 2, False)
            back = await client.put("/scaling/chat", json={})
            assert back.json()["setting"] is None

    async def test(world: World) -> None:
        async with controlled(world, plan_of(world)) as it:
            await story(it)

    play(tmp_path, test)


def test_invalid_scaling_request_names_the_field(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with controlled(world, plan_of(world)) as it, served(it.rig, tmp_path) as client:
            await it.has(1)
            missing = await client.get("/scaling/nobody")
            assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
            assert (await client.put("/scaling/nobody", json={"replicas": 1})).status_code == 404
            outside = await client.put("/scaling/chat", json={"replicas": 9})
            assert (outside.status_code, outside.json()["error"]["param"]) == (409, "replicas")
            assert (await client.put("/scaling/chat", json={"replicas": 1001})).status_code == 400
            assert (await client.put("/scaling/chat", json={"least": 1})).status_code == 400

    play(tmp_path, test)


def test_on_demand_model_at_zero_replicas_keeps_the_cluster_ready(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with controlled(world, plan_of(world, {"max": 2, "min": 0}, replicas=0)) as it:
            await it.has(0)
            async with served(it.rig, tmp_path) as client:
                await it.rig.until(lambda: it.rig.control.state.slots[0].state == "ready")
                ready = await client.get("http://admin/readyz")
                assert (ready.status_code, ready.text) == (200, "ok\n")

    play(tmp_path, test)
