"""The demo's chat model on three nodes with a standby replica: failures and drains are not visible to clients."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.e2e.availability.fresh_cluster import fresh_cluster
from tests.e2e.availability.nodes import placed, said
from tests.e2e.cluster import CHAT, PLAIN, TEST_PROCESS, Cluster, launch, wait_for
from tests.e2e.faults.grounds import STORIES, aside, routes
from tests.e2e.faults.load import Load, Patient, burst, loading
from tests.e2e.rollouts.rolling import watching

from forebay.control.standby.sla import Sla

REPLICAS = 2
STREAMS = 16
"""As many as two replicas have places."""
NODES = ("left", "middle", "right")
TEXTS: dict[int, str | None] = dict.fromkeys(range(STORIES))
"""What a real model says again may be another text."""
MODEL = {**CHAT, "replicas": REPLICAS, "standby": 1, "slo": {"availability": 0.999, "ttft_p99_ms": 1000}}
START_S = 120.0
"""For a replica to start, on a machine that is busy."""


class Reader(Patient):
    """One that is in the middle of an answer most of the time."""

    tokens = 20


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, name = Path(tmp_path_factory.mktemp("standby")), f"e2e-standby-{TEST_PROCESS}"
    with fresh_cluster(folder, name, MODEL, nodes=[{"name": each} for each in NODES]) as cluster:
        yield cluster


def serving(cluster: Cluster) -> list[str]:
    return [f"{each.id}.{each.generation}" for each in routes(cluster, "chat").replicas if each.state == "ready"]


def standbys(cluster: Cluster) -> list[str]:
    return [
        f"{each['id']}.{each['generation']}"
        for each in cluster.replicas("chat")
        if each["standby"] and each["state"] == "ready"
    ]


def test_standby_replaces_a_killed_replica_at_full_load(chat: Cluster) -> None:
    async def main() -> dict[str, float]:
        loop, after_s = asyncio.get_running_loop(), dict[str, float]()
        async with loading(chat.gateway_port, "chat", TEXTS, Reader, streams=STREAMS, whole=0) as load:
            await load.until("only two serve", lambda: load.last().keys() == {victim["id"], other})
            os.kill(victim["pid"], signal.SIGKILL)
            killed_at, asked = loop.time(), len(load.seen)
            await load.until("gateways are told", lambda: f"{spare}.1" in serving(chat))
            after_s["gateways are told of the stand-in"] = loop.time() - killed_at
            await load.until("it has answered", lambda: any(each.replica == spare for each in load.seen[asked:]))
            after_s["the first whole answer begun there has ended"] = loop.time() - killed_at
            await aside("the killed one is back, and rests", lambda: standbys(chat) == [f"{victim['id']}.2"], START_S)
            after_s["the killed one is back, and rests"] = loop.time() - killed_at
            await load.until("the stand-in and the other serve", lambda: load.last().keys() == {other, spare})
        assert load.bad() == []
        return after_s

    wait_for("one rests", lambda: len(standbys(chat)) == 1)
    victim, spare = next(r for r in chat.replicas("chat") if not r["standby"]), standbys(chat)[0].removesuffix(".1")
    [other] = {"chat-0", "chat-1", "chat-2"} - {victim["id"], spare}
    assert sorted(serving(chat)) == sorted([f"{other}.1", f"{victim['id']}.1"])
    for what, seconds in asyncio.run(main()).items():
        print(f"{seconds * 1000:7.0f} ms after the kill: {what}")

    said_now = PLAIN.get(f"{chat.admin}/v1/sla", params={"period_s": 86_400}, timeout=30).content
    told = msgspec.json.decode(said_now, type=Sla)
    [model] = told.models
    assert model.requests
    assert (model.requests.failed, model.success) == (0, 1.0)
    assert model.requests.ok >= 2 * STREAMS
    assert (model.promise.spares, model.promise.failures, model.promise.repairs) == (1, 1, 1)
    assert [each.unit for each in model.incidents if each.what == "failure"] == [victim["id"]]
    assert model.kept[0].requests
    assert model.gaps[-1].until <= told.until


def test_node_drains_under_load_and_serves_again_after_undrain(chat: Cluster) -> None:
    async def main() -> Load:
        async with (
            loading(chat.gateway_port, "chat", TEXTS, Reader, streams=STREAMS, whole=0) as load,
            watching(chat, "chat", REPLICAS) as watch,
        ):
            before = await asyncio.to_thread(placed, chat)
            moving = serving(chat)[0].partition(".")[0]
            node = next(node for node in NODES if before[node] == [moving])
            standing = await asyncio.to_thread(said, chat, "drain", node, "--why", "a test", "--wait")
            assert (standing["state"], standing["why"]) == ("drained", "a test")
            await aside("one rests again", lambda: len(standbys(chat)) == 1, START_S)
            await load.until("both serve", lambda: len(load.last()) == REPLICAS)
            after = await asyncio.to_thread(placed, chat)
            assert after[node] == []
            assert sorted(slot for each in NODES for slot in after[each]) == ["chat-0", "chat-1", "chat-2"]
            assert watch.fewest == REPLICAS, "the next one comes before the last one goes"
            await asyncio.to_thread(said, chat, "undrain", node)
            await load.more(STREAMS)
        return load

    wait_for("one rests", lambda: len(standbys(chat)) == 1, START_S)
    load = asyncio.run(main())
    assert load.bad() == []


def test_standby_assignment_survives_a_control_restart(chat: Cluster) -> None:
    wait_for("two serve, one rests", lambda: (len(serving(chat)), len(standbys(chat))) == (REPLICAS, 1), START_S)
    before, spare = serving(chat), standbys(chat)
    chat.process.kill()
    chat.process.wait()
    [alone] = asyncio.run(burst(chat.gateway_port, "chat", [0], stream=True))
    assert not alone.error
    ports = chat.gateway_port, chat.admin_port
    chat.process = launch(chat.file, chat.name, ports, chat.home).process
    wait_for("it has a look", lambda: standbys(chat) == spare, START_S)

    assert serving(chat) == before
