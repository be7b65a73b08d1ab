"""A replica that rests steps in for one that is killed at full load: no request fails, and `sla` tells of it."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.e2e.cluster import TEST_HOME, TEST_PROCESS, Cluster, launch, running, wait_for
from tests.e2e.faults.grounds import aside, routes
from tests.e2e.faults.load import CLIENTS, Seen, burst, loading, undisturbed

from forebay.control.standby.sla import Sla

STORIES = 8
MODEL = {
    "name": "pair",
    "task": "chat",
    "source": "synthetic",
    "engine": {"name": "synthetic", "step_ms": 20, "concurrency": CLIENTS // 2},
    "replicas": 2,
    "standby": 1,
    "slo": {"availability": 0.999, "ttft_p99_ms": 1000},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    name = f"standby-{TEST_PROCESS}"
    shutil.rmtree(TEST_HOME / "run" / name, ignore_errors=True)  # the history of an earlier run
    with running(Path(tmp_path_factory.mktemp("standby")), name, [MODEL]) as cluster:
        yield cluster


def serving(cluster: Cluster) -> list[str]:
    return [f"{each.id}.{each.generation}" for each in routes(cluster, "pair").replicas if each.state == "ready"]


def resting(cluster: Cluster) -> list[str]:
    return [f"{each['id']}.{each['generation']}" for each in cluster.replicas("pair") if each["standby"]]


def answered(seen: list[Seen], replica: str) -> int:
    """How many answers began there."""
    return sum(each.replica == replica for each in seen)


def test_one_that_rests_steps_in_for_one_that_is_killed_at_full_load(pair: Cluster) -> None:
    async def main() -> dict[str, float]:
        texts = await undisturbed(pair.gateway_port, "pair", STORIES)
        loop, after_s = asyncio.get_running_loop(), dict[str, float]()
        async with loading(pair.gateway_port, "pair", texts) as load:
            await load.more(CLIENTS)
            assert set(load.shares(len(load.seen))) == {victim["id"], other}
            os.kill(victim["pid"], signal.SIGKILL)
            killed_at = loop.time()
            await load.until("gateways are told", lambda: f"{spare}.1" in serving(pair))
            after_s["gateways are told of the stand-in"] = loop.time() - killed_at
            await load.until("it has answered", lambda: answered(load.seen, spare) > 0)
            after_s["the first whole answer begun there has ended"] = loop.time() - killed_at
            await aside("the killed one is back, and rests", lambda: resting(pair) == [f"{victim['id']}.2"])
            after_s["the killed one is back, and rests"] = loop.time() - killed_at
            await load.more(2 * CLIENTS)
        assert load.bad() == []
        assert load.shares(CLIENTS).keys() == {other, spare}
        return after_s

    wait_for("one rests", lambda: len(resting(pair)) == 1)
    victim, spare = next(r for r in pair.replicas("pair") if not r["standby"]), resting(pair)[0].removesuffix(".1")
    [other] = {"pair-0", "pair-1", "pair-2"} - {victim["id"], spare}
    assert sorted(serving(pair)) == sorted([f"{other}.1", f"{victim['id']}.1"])
    for what, seconds in asyncio.run(main()).items():
        print(f"{seconds * 1000:7.0f} ms after the kill: {what}")

    said = msgspec.json.decode(
        httpx.get(f"{pair.admin}/v1/sla", params={"period_s": 86_400}, timeout=30).content, type=Sla
    )
    [model] = said.models
    assert model.requests
    assert (model.requests.failed, model.success) == (0, 1.0)
    assert model.requests.ok >= 3 * CLIENTS
    assert (model.promise.spares, model.promise.failures, model.promise.repairs) == (1, 1, 1)
    assert [each.unit for each in model.incidents if each.what == "failure"] == [victim["id"]]
    assert model.kept[0].requests
    assert model.gaps[-1].until <= said.until


def test_the_same_ones_serve_after_control_was_killed(pair: Cluster) -> None:
    before, spare = serving(pair), resting(pair)
    assert (len(before), len(spare)) == (2, 1)
    pair.process.kill()
    pair.process.wait()
    [alone] = asyncio.run(burst(pair.gateway_port, "pair", [0], stream=True))
    assert not alone.error
    ports = pair.gateway_port, pair.admin_port
    pair.process = launch(pair.file, pair.name, ports, pair.home).process
    wait_for("it has a look", lambda: resting(pair) == spare)

    assert serving(pair) == before
