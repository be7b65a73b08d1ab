"""Thirty rollouts in a row under load, with a fault at every step: no client sees any of them."""

import asyncio
import random
from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.faults.grounds import GATEWAYS, STORIES, aside, private_urls, run_folder, samples, wait_quiet
from tests.e2e.faults.load import Load, loading, undisturbed
from tests.e2e.rollouts import rolling
from tests.e2e.rollouts.revisions import serving, words
from tests.e2e.rollouts.rolling import Watch

REPLICAS = 2
STEP_MS = 10
MODEL = {"name": "chat", "task": "chat", "replicas": REPLICAS, "rollout": rolling.LOOSE}
CANARY = rolling.canary((0.25, 0.5), (0.5, 60.0), settle_s=1.0)
AT_ONCE = {"kind": "blue-green", "warm_up_s": 0.0, "settle_s": 1.0}
MOMENTS = {"starting": 8, "comparing": 7, "comparing more": 7, "settling": 8}
"""Where rollouts are when something goes wrong, and how many of them."""
LATE = ("settling", "promoted")
"""What is killed then may be killed when all is over."""
FAULTS = ("kill new", "kill stable", "kill control", "lock the store")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two gateways, and a model with two replicas."""
    folder = tmp_path_factory.mktemp("thirty")
    first = {"step_ms": STEP_MS}
    with serving(
        folder, "e2e-rollouts", MODEL, lambda path: words(path, "chat", **first), processes=GATEWAYS
    ) as cluster:
        yield cluster
        assert cluster.stop() == 0
        assert cluster.pids() == []


class Rolls:
    """The cluster, the load on it, and the revisions between which it goes to and fro."""

    def __init__(self, cluster: Cluster, load: Load, watch: Watch) -> None:
        self.cluster = cluster
        self.load = load
        self.watch = watch
        self.stable = str(cluster.replicas("chat")[0]["revision"])
        both = [words(cluster.file, "chat", step_ms=STEP_MS)]
        both.append(words(cluster.file, "chat", step_ms=STEP_MS, kv_cache_tokens=300_000))
        [self.new] = [each for each in both if each != self.stable]

    async def roll(self, moment: str, fault: str, plan: rolling.Plan) -> None:
        """One rollout with its fault."""
        cluster, trial = self.cluster, f"{fault} when {moment}"
        self.watch.fewest = REPLICAS
        id = await asyncio.to_thread(rolling.deploy, cluster, "chat", self.new, plan)
        late = await self._moment(id, moment) in LATE
        await self._fault(fault)
        seen = await asyncio.to_thread(rolling.reached, cluster, id)
        if seen["phase"] == "promoted":
            assert fault != "kill new" or late, (trial, seen)
            self.stable, self.new = self.new, self.stable
        else:
            assert (fault, seen["phase"]) == ("kill new", "rolled_back"), (trial, seen)
            assert "crash" in seen["why"]
        await rolling.served_by(self.load, self.stable)
        await asyncio.to_thread(rolling.settled, cluster, "chat", self.stable, REPLICAS)
        assert self.load.bad() == [], trial
        killed = fault == "kill stable" or (fault == "kill new" and seen["phase"] == "promoted")
        assert self.watch.fewest >= REPLICAS - killed, trial

    async def _moment(self, id: str, moment: str) -> str:
        """Wait for it or for what comes after it, and say which; who only starts is not served meanwhile."""
        load, cluster = self.load, self.cluster
        since = len(load.seen)
        while True:
            before = len(load.seen)
            seen = await asyncio.to_thread(rolling.standing, cluster, id)
            name = "comparing more" if seen["phase"] == "comparing" and seen["step"] else seen["phase"]
            if name == "starting":
                asked = [each for each in load.seen[since:before] if each.asked_at >= since]
                assert [each for each in asked if each.revision != self.stable] == []
            if seen["ended"] or [*MOMENTS].index(name) >= [*MOMENTS].index(moment):
                return name
            await asyncio.sleep(rolling.LOOK_S)

    async def _fault(self, fault: str) -> None:
        cluster = self.cluster
        match fault:
            case "kill new":
                pids = await aside("it has a worker", lambda: rolling.processes(cluster, "chat", self.new))
                rolling.kill_one(pids)
            case "kill stable":
                rolling.kill_one(await asyncio.to_thread(rolling.processes, cluster, "chat", self.stable))
            case "kill control":
                await asyncio.to_thread(rolling.kill_control, cluster)
            case _:
                with rolling.locked(cluster.file.with_name("store.db")):
                    await self.load.more(16)


def never_to_the_unready(cluster: Cluster) -> None:
    """No gateway has ever sent a request to a replica that had to say that it is not ready yet."""
    for url in private_urls(run_folder(cluster) / "peers"):
        early = [key for key in samples(url) if key.startswith("forebay_retries_total") and "engine_loading" in key]
        assert early == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_client_sees_rollouts_in_which_something_goes_wrong_while_they_are(cluster: Cluster, moment: str) -> None:
    rng = random.Random(moment)
    extra = rng.choices(FAULTS, k=MOMENTS[moment] - len(FAULTS))
    plan = CANARY if moment.startswith("comparing") else AT_ONCE

    async def main() -> None:
        port = cluster.gateway_port
        texts = await undisturbed(port, "chat", STORIES)
        async with loading(port, "chat", texts) as load, rolling.watching(cluster, "chat", REPLICAS) as watch:
            rolls = Rolls(cluster, load, watch)
            for fault in FAULTS:
                await rolls.roll(moment, fault, CANARY)
            for fault in extra:
                await rolls.roll(moment, fault, plan)
        assert load.bad() == []

    cluster.wait_ready(60)
    asyncio.run(main())
    wait_quiet(run_folder(cluster) / "peers", [each["url"] for each in cluster.ready_replicas("chat")])
    never_to_the_unready(cluster)
    assert len(cluster.pids()) == GATEWAYS + REPLICAS
