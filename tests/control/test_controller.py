"""The reconcile loop over real processes: dead units are replaced, running ones kept, stopped ones drained."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.control.api.rig import services
from tests.control.fakes.provider import MemoryProvider
from tests.control.rig import Rig, controlled, plan
from tests.control.units import kill_all, replica

from forebay.control.api.app import make_app
from forebay.control.changes import Reloaded
from forebay.control.plan import Places
from forebay.core.model import ReplicaState
from forebay.core.reconcile import Rules
from forebay.providers.processes import session_leaders

READY = ReplicaState.READY


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_all(tmp_path)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def complete(rig: Rig) -> Callable[[], bool]:
    return lambda: rig.status().complete


def test_planned_units_start_and_are_published(folder: Path) -> None:
    async def test() -> None:
        wanted = plan(folder, replica("chat-0"), replica("chat-1"), replica("embed-0"))
        async with controlled(folder, wanted) as rig:
            await rig.until(complete(rig))

            routes = {m.name: [(r.id, r.state) for r in m.replicas] for m in rig.snapshot().models}
            assert routes == {"chat": [("chat-0", READY), ("chat-1", READY)], "embed": [("embed-0", READY)]}
            assert rig.status().ready
            assert len({r.pid for m in rig.status().models for r in m.replicas}) == 3

    run(test)


def test_killed_replica_is_replaced_and_the_reason_is_recorded(folder: Path) -> None:
    async def test() -> None:
        async with controlled(folder, plan(folder, replica("chat-0"), replica("chat-1"))) as rig:
            await rig.until(complete(rig))
            version = rig.snapshot().version
            os.kill(rig.replica().pid, signal.SIGKILL)
            await rig.until(lambda: rig.replica().generation == 2 and rig.replica().state is READY)

            died = next(e for e in rig.events("chat-0") if e.kind == "died")
            assert "SIGKILL" in died.why
            assert "started" in died.last_words
            assert rig.replica().restarts == 1
            assert rig.replica("chat-1").restarts == 0
            assert b'forebay_restarts_total{unit="chat-0"} 1.0' in rig.metrics.render()
            assert rig.snapshot().version > version
            assert rig.snapshot().models[0].replicas[0].generation == 2
            assert "SIGKILL" in Places(folder).log.read_text()

    run(test)


def test_crash_loop_backs_off_and_shows_the_last_output(folder: Path) -> None:
    async def test() -> None:
        wanted = plan(folder, replica("chat-0", "dies"), replica("embed-0"))
        async with controlled(folder, wanted) as rig:
            await rig.until(lambda: rig.replica().state is ReplicaState.QUARANTINED)

            broken = rig.replica()
            assert "the moon is full" in broken.last_words
            assert "starts again in" in broken.why
            assert broken.starts_again_in_s is not None
            assert broken.restarts >= 2
            assert broken.pid is None
            await rig.until(lambda: rig.replica("embed-0").state is READY)
            assert not rig.status().ready
            assert b"forebay_crash_loops 1.0" in rig.metrics.render()

    run(test)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "mute"])
def test_unresponsive_unit_is_killed_and_replaced(folder: Path, how: str) -> None:
    async def test() -> None:
        rules = Rules(unresponsive_s=1.0, look_again_s=0.2)
        first = replica("chat-0", "mute" if how == "mute" else "well")
        async with controlled(folder, plan(folder, first, with_gateway=False), rules=rules) as rig:
            if how == "stopped":
                await rig.until(lambda: rig.replica().state is READY)
                os.kill(rig.replica().pid, signal.SIGSTOP)
            await rig.until(lambda: rig.replica().generation == 2)

            assert any("no answer for" in e.why for e in rig.events("chat-0"))
            assert len(list(session_leaders(folder / "units"))) == 1

    run(test)


def test_new_control_adopts_units_and_continues_snapshot_versions(folder: Path) -> None:
    async def test() -> None:
        wanted = plan(folder, replica("chat-0"), replica("chat-1"))
        async with controlled(folder, wanted) as rig:
            await rig.until(complete(rig))
            before = {r.id: r.pid for r in rig.status().models[0].replicas}
            gateway_pid, version = rig.status().gateways[0].pid, rig.snapshot().version

        async with controlled(folder, wanted) as rig:
            await rig.until(complete(rig))
            assert {r.id: r.pid for r in rig.status().models[0].replicas} == before
            assert rig.status().gateways[0].pid == gateway_pid
            assert [e.kind for e in rig.events()].count("adopted") == 3
            assert rig.snapshot().version >= version
            os.kill(before["chat-0"], signal.SIGKILL)
            await rig.until(lambda: rig.replica().generation == 2 and rig.replica().state is READY)
            assert rig.snapshot().version > version

    run(test)


def test_new_control_replaces_outdated_units(folder: Path) -> None:
    async def test() -> None:
        async with controlled(folder, plan(folder, replica("chat-0"), replica("old-0"))) as rig:
            await rig.until(complete(rig))

        async with controlled(folder, plan(folder, replica("chat-0", digest="d2"))) as rig:
            await rig.until(lambda: rig.status().complete and rig.replica().generation == 2)
            assert {spec.parent.name for _, spec in session_leaders(folder / "units")} == {
                "chat-0.g2",
                "gateway-0.g1",
            }
            assert any("outdated" in e.why for e in rig.events("chat-0"))
            assert any("no longer wanted" in e.why for e in rig.events("old-0"))

    run(test)


def test_stop_drains_gateways_before_replicas_and_leaves_no_units(folder: Path) -> None:
    async def test() -> None:
        async with controlled(folder, plan(folder, replica("chat-0"), replica("embed-0"))) as rig:
            await rig.until(complete(rig))
            rig.control.stop()
            await rig.task

            ended = [e.unit for e in rig.events() if e.kind == "died"]
            assert ended[0] == "gateway-0"
            assert sorted(ended[1:]) == ["chat-0", "embed-0"]
            assert list(session_leaders(folder / "units")) == []
            assert list((folder / "units").iterdir()) == []

    run(test)


def test_kill_ends_units_that_ignore_stop(folder: Path) -> None:
    async def test() -> None:
        async with controlled(folder, plan(folder, replica("chat-0", "stubborn", grace_s=3600))) as rig:
            await rig.until(complete(rig))
            rig.control.stop()
            await rig.until(lambda: rig.replica().state is ReplicaState.DRAINING)
            rig.control.kill()
            await rig.task

            assert list(session_leaders(folder / "units")) == []

    run(test)


def test_unobservable_units_are_left_alone_and_reported(folder: Path) -> None:
    async def test() -> None:
        provider = MemoryProvider()
        rules = Rules(look_again_s=0.05, unresponsive_s=3600)
        async with controlled(folder, plan(folder, replica("chat-0"), with_gateway=False), provider, rules) as rig:
            await rig.until(lambda: rig.replica().pid)
            provider.unreachable = "the network is down"
            await rig.until(lambda: "the network is down" in rig.status().trouble)
            provider.unreachable = ""
            await rig.until(lambda: not rig.status().trouble)

            assert [u.key for u in await provider.observe()] == [("chat-0", 1)]
            assert len([e for e in rig.events() if e.kind == "trouble"]) == 1

    run(test)


def test_unwritable_snapshot_is_reported_and_reconciling_continues(folder: Path) -> None:
    async def test() -> None:
        snapshot = Places(folder).snapshot
        snapshot.mkdir()
        async with controlled(folder, plan(folder, replica("chat-0"))) as rig:
            await rig.until(lambda: rig.status().complete and "snapshot" in rig.status().trouble)
            snapshot.rmdir()
            await rig.until(lambda: snapshot.is_file() and not rig.status().trouble)
            assert rig.snapshot().models[0].replicas[0].state is READY

    run(test)


def test_admin_api_reports_cluster_status(folder: Path) -> None:
    results = [Reloaded(("line 1  bad",)), Reloaded((), (), ("chat: 1 replica more",))]

    async def test() -> None:
        async with controlled(folder, plan(folder, replica("chat-0"), replica("embed-0", "loads"))) as rig:
            app = httpx.ASGITransport(make_app(services(rig, folder, results)))
            async with httpx.AsyncClient(transport=app, base_url="http://admin") as client:
                await rig.until(lambda: rig.replica("embed-0").state is ReplicaState.WARMING)
                await rig.until(lambda: rig.replica("chat-0").state is READY)

                assert (await client.get("/livez")).status_code == 200
                not_ready = await client.get("/readyz")
                assert not_ready.status_code == 503
                assert "embed: no replica is ready" in not_ready.text
                status = (await client.get("/v1/status")).json()
                models = {m["name"]: m for m in status["models"]}
                assert (models["chat"]["ready"], models["chat"]["wanted"]) == (1, 1)
                assert models["chat"]["slo"] == {"availability": 0.99}
                [one] = models["chat"]["replicas"]
                assert (one["id"], one["model"], one["revision"], one["state"]) == ("chat-0", "chat", "r-1", "ready")
                assert one["url"].startswith("http://127.0.0.1:")
                assert one["capacity"] == 8
                assert status["gateways"][0]["pid"] > 0
                events = (await client.get("/v1/events")).json()["events"]
                later = (await client.get("/v1/events", params={"after": events[-1]["number"]})).json()["events"]
                assert later == []
                assert (await client.get("/v1/events?after=x")).status_code == 400
                assert "forebay_replicas" in (await client.get("/metrics")).text
                missing = await client.get("/nothing")
                assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
                assert (await client.post("/livez")).status_code == 405
                assert (await client.get("/v1/reload")).status_code == 405
                page = await client.post("/v1/reload", headers={"origin": "http://admin"})
                assert (page.status_code, page.json()["error"]["param"]) == (400, "origin")
                refused, done = await client.post("/v1/reload"), await client.post("/v1/reload")
                assert (refused.status_code, refused.json()["problems"]) == (422, ["line 1  bad"])
                assert (done.status_code, done.json()["effects"]) == (200, ["chat: 1 replica more"])

    run(test)
