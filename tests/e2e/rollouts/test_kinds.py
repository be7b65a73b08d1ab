"""The kinds of rollouts as clients see them: pins, A/B tests, blue-green, shadows, and a pause."""

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.faults.grounds import STORIES, aside
from tests.e2e.faults.load import Client, Load, loading, undisturbed
from tests.e2e.rollouts import rolling
from tests.e2e.rollouts.revisions import serving, words

REPLICAS = 2
STEP_MS = 4.0
CALLERS, CALLS_MIN = 24, 4
INTERVAL_S = 180.0
"""For an interval; nothing is known of the machine."""
MODEL = {"name": "chat", "task": "chat", "replicas": REPLICAS, "rollout": rolling.LOOSE}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose one model has two replicas."""
    folder = tmp_path_factory.mktemp("kinds")
    with serving(folder, "e2e-kinds", MODEL, lambda path: words(path, "chat", step_ms=STEP_MS)) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """The same, as it is between rollouts."""
    wait_for("there are no others", lambda: len(shared.replicas("chat")) == REPLICAS)
    shared.wait_ready(60)
    return shared


@pytest.fixture
def stable(cluster: Cluster) -> str:
    """The revision that serves."""
    [revision] = {str(each["revision"]) for each in cluster.replicas("chat")}
    return revision


@pytest.fixture
def other(cluster: Cluster) -> str:
    """A revision that says the same and takes half as long again, which has never been served."""
    size = random.randrange(10_000, 200_000)
    return words(cluster.file, "chat", step_ms=1.5 * STEP_MS, kv_cache_tokens=size)


@asynccontextmanager
async def asking(cluster: Cluster) -> AsyncIterator[Load]:
    """Clients, none of whom may see anything bad."""
    texts = await undisturbed(cluster.gateway_port, "chat", STORIES)
    async with loading(cluster.gateway_port, "chat", texts) as load:
        yield load
    assert load.bad() == []


async def begin(cluster: Cluster, revision: str, plan: rolling.Plan, *phases: str) -> rolling.Standing:
    """A rollout, once it is in one of these phases."""
    id = await asyncio.to_thread(rolling.deploy, cluster, "chat", revision, plan)
    return await asyncio.to_thread(rolling.reached, cluster, id, *phases)


async def pinned(cluster: Cluster, revision: str) -> str:
    """Which revision answers who asks for one."""
    client = Client(cluster.gateway_port, f"chat@{revision}")
    try:
        seen = await client.ask(0, stream=True)
    finally:
        client.close()
    assert not seen.error, seen
    return seen.revision


def test_pinned_request_gets_its_revision_even_while_paused(cluster: Cluster, stable: str, other: str) -> None:
    async def main() -> None:
        async with asking(cluster) as load:
            seen = await begin(cluster, other, rolling.canary((0.05, 600.0), (0.1, 600.0)), "comparing")
            assert seen["phase"] == "comparing", seen
            await asyncio.to_thread(rolling.command, cluster, seen["id"], "pause")
            held = await asyncio.to_thread(rolling.standing, cluster, seen["id"])  # until then it went on
            # control says that it compares before gateways know of it
            await load.until("requests are divided", lambda: any(each.revision == other for each in load.seen))
            for revision in (stable, other):
                assert await pinned(cluster, revision) == revision
            await load.more(40)
            paused = await asyncio.to_thread(rolling.standing, cluster, seen["id"])
            assert (held["paused"], paused["paused"], paused["step"]) == (True, True, held["step"])
            await asyncio.to_thread(rolling.command, cluster, seen["id"], "abort")
            await asyncio.to_thread(rolling.settled, cluster, "chat", stable, REPLICAS)  # gateways know by then
            await rolling.served_by(load, stable)

    asyncio.run(main())
    rolling.settled(cluster, "chat", stable, REPLICAS)


def test_blue_green_moves_all_traffic_at_once(cluster: Cluster, stable: str, other: str) -> None:
    plan = {"kind": "blue-green", "warm_up_s": 0.0, "settle_s": 1.0}

    async def main() -> None:
        async with asking(cluster) as load:
            seen = await begin(cluster, other, plan)
            assert seen["phase"] == "promoted", seen
            await rolling.served_by(load, other)
            first = next(each.number for each in load.seen if each.revision == other)
            later = [each.revision for each in load.seen if each.asked_at > first]
            assert set(later) == {other}

    asyncio.run(main())
    rolling.settled(cluster, "chat", other, REPLICAS)


def test_shadow_sends_no_responses_to_clients(cluster: Cluster, stable: str, other: str) -> None:
    plan = {"kind": "shadow", "steps": [{"share": 0.9, "time_s": 600.0}], "warm_up_s": 0.1}

    async def main() -> None:
        async with asking(cluster) as load:
            seen = await begin(cluster, other, plan, "comparing")
            assert seen["phase"] == "comparing", seen
            at = next(each["url"] for each in cluster.replicas("chat") if each["revision"] == other)
            done = "forebay_worker_requests_total{"
            await aside("it works", lambda: [key for key in cluster.metrics(at) if key.startswith(done)])
            await asyncio.to_thread(rolling.command, cluster, seen["id"], "promote")
            seen = await asyncio.to_thread(rolling.reached, cluster, seen["id"])
            assert seen["phase"] == "judged", seen
            await load.more(16)
            assert {each.revision for each in load.seen} == {stable}

    asyncio.run(main())
    rolling.settled(cluster, "chat", stable, REPLICAS)


def test_ab_test_keeps_callers_in_their_arm_and_reports_the_difference(cluster: Cluster, stable: str) -> None:
    other = words(cluster.file, "chat", step_ms=4 * STEP_MS)
    plan = {"kind": "ab", "steps": [{"share": 0.5, "time_s": 600.0}], "warm_up_s": 0.1}
    id = rolling.deploy(cluster, "chat", other, plan)
    assert rolling.reached(cluster, id, "comparing")["phase"] == "comparing"
    enough = threading.Event()

    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "ignore_eos": True}

    def ask(client: httpx.Client, caller: str) -> str:
        headers = {"x-forebay-session": caller}
        answer = client.post("/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-forebay-model-revision"])

    def call(number: int) -> list[str]:
        found = []
        with httpx.Client(base_url=cluster.url) as client:
            while not (enough.is_set() and len(found) >= CALLS_MIN):
                found.append(ask(client, f"caller-{number}"))
        return found

    others = itertools.count()
    with httpx.Client(base_url=cluster.url) as client:  # control says that it compares before gateways know of it
        wait_for("requests are divided", lambda: ask(client, f"other-{next(others)}") == other)

    def latency() -> dict[str, float | None]:
        cluster.status()  # for which control looks at everything, requests too
        effects = rolling.standing(cluster, id)["effects"]
        return next(each for each in effects if each["metric"] == "latency")

    with ThreadPoolExecutor(CALLERS) as pool:
        calling = [pool.submit(call, number) for number in range(CALLERS)]
        try:
            wait_for("the latency has an interval", lambda: latency()["low"], INTERVAL_S)
        finally:
            enough.set()
        sides = [set(each.result()) for each in calling]
    assert {len(side) for side in sides} == {1}
    assert set.union(*sides) == {stable, other}

    rolling.command(cluster, id, "promote")
    seen = rolling.reached(cluster, id)
    assert seen["phase"] == "judged", seen
    found = latency()
    low, estimate, high = found["low"], found["estimate"], found["high"]
    assert low, found
    assert estimate, found
    assert high, found
    assert 1.3 < low < estimate < high < 12, found
    rolling.settled(cluster, "chat", stable, REPLICAS)
