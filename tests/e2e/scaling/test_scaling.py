"""The demo's embedding model scales out, in, and to zero with its load, and no request fails.

Its PostgreSQL store is down for a minute meanwhile."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from tests.e2e.availability.fresh_cluster import fresh_cluster
from tests.e2e.cluster import EMBED, TEST_PROCESS, Cluster
from tests.e2e.faults.embedding import Embedder
from tests.e2e.faults.grounds import STORIES, aside
from tests.e2e.faults.load import Load, loading
from tests.e2e.rollouts.revisions import forebay
from tests.store.postgres import Postgres
from tests.store.postgres import serving as postgres

TEXTS: dict[int, str | None] = dict.fromkeys(range(STORIES))
GATEWAYS = 1
MANY, MOST = 8, 3
START_S = 180.0
"""For replicas to come, or to go, on a machine that is busy."""
DOWN_S = 60.0
"""For so long there is no PostgreSQL."""
GONE_S = 2.0
PAUSE_S = 0.2
"""Between an answer and the next question of who asks little."""
MODEL = {
    **EMBED,
    "engine": {"name": "onnx", "threads": 1, "max_batch": 1},  # so that a few clients are many
    "replicas": 0,
    "slo": {"latency_p99_ms": 60_000},  # kept on any machine
    "scale": {"min": 0, "max": MOST, "to_zero_after_s": GONE_S, "down": {"window_s": GONE_S}},
}
"""By the policy of those who name none."""
CONTROL = {"controllers": "several", "lease_s": 3.0}
"""Control leads for as long as the store says so."""


def asleep(cluster: Cluster) -> bool:
    """No replica of the model is left, and no process of one."""
    return not cluster.replicas("embed") and len(cluster.pids()) == GATEWAYS


async def woken(cluster: Cluster) -> float:
    """Ask a model that has no replica; how long the answer took, seconds."""
    await aside("nobody is left", lambda: asleep(cluster), START_S)
    client, loop = Embedder(cluster.gateway_port, "embed"), asyncio.get_running_loop()
    began = loop.time()
    seen = await client.ask(0, stream=False)
    client.close()
    assert not seen.error
    return loop.time() - began


async def asked_now_and_then(cluster: Cluster, until: Callable[[], bool]) -> None:
    """Ask little."""
    client, load = Embedder(cluster.gateway_port, "embed"), Load(TEXTS)
    async with asyncio.timeout(START_S):
        while not await asyncio.to_thread(until):
            load.seen.append(await client.ask(0, stream=False))
            await asyncio.sleep(PAUSE_S)
    client.close()
    assert load.seen
    assert load.bad() == []


async def ramp(cluster: Cluster, server: Postgres) -> None:
    """From none to many, by way of few to none."""
    loop = asyncio.get_running_loop()
    took_s = await woken(cluster)
    async with loading(cluster.gateway_port, "embed", TEXTS, Embedder, streams=0, whole=MANY) as load:
        await aside("more replicas", lambda: len(cluster.ready_replicas("embed")) == MOST, START_S)
        await load.until("they all serve", lambda: len(load.shares(MANY * MOST)) == MOST)
    assert load.bad() == []

    server.kill()
    back_at = loop.time() + DOWN_S
    await asked_now_and_then(cluster, lambda: loop.time() >= back_at)
    assert "could not be renewed" in cluster.status()["trouble"]
    assert len(cluster.ready_replicas("embed")) == MOST
    await asyncio.to_thread(server.start)
    await asked_now_and_then(cluster, lambda: len(cluster.replicas("embed")) == 1)
    print(f"\nan answer from no replica: after {took_s:.1f} s, and later after {await woken(cluster):.1f} s")


def test_replicas_scale_with_load_from_zero_and_back_to_zero(tmp_path: Path) -> None:
    with (
        postgres() as server,
        fresh_cluster(
            tmp_path, f"e2e-scaling-{TEST_PROCESS}", MODEL, store=server.make("scaling"), control=CONTROL
        ) as cluster,
    ):
        asyncio.run(ramp(cluster, server))
        said = forebay(cluster.file, "history", "model/embed", "--json")
    changed = [each["why"] for each in json.loads(said) if each["kind"] == "scale.changed"]
    sizes = [int(why.partition(" → ")[2].partition(" ")[0]) for why in changed]
    most = sizes.index(MOST)
    none = sizes.index(0, most)
    assert sizes[:most] == sorted(sizes[:most]), changed
    assert sizes[most:none] == sorted(sizes[most:none], reverse=True), changed
    assert sizes[none - 1 : none + 2] == [1, 0, 1], changed
