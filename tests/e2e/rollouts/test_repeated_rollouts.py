"""Thirty rollouts in a row under load, with a fault at every step: clients see no error."""

import asyncio
import random
from collections.abc import Iterator
from functools import partial

import pytest
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.faults.grounds import GATEWAYS, STORIES, run_folder, wait_quiet
from tests.e2e.faults.load import loading, undisturbed
from tests.e2e.rollouts import rolling
from tests.e2e.rollouts.revisions import serving, words
from tests.e2e.rollouts.trials import FAULTS, MOMENTS, REPLICAS, Rolls, never_to_the_unready

STEP_MS = 10
OTHER = {"step_ms": STEP_MS, "kv_cache_tokens": 300_000}
MODEL = {"name": "chat", "task": "chat", "replicas": REPLICAS, "rollout": rolling.LOOSE}
CANARY = rolling.canary((0.25, 0.5), (0.5, 600.0), settle_s=1.0)
AT_ONCE = {"kind": "blue-green", "warm_up_s": 0.0, "settle_s": 1.0}
TIMES = dict(zip(MOMENTS, (8, 7, 7, 8), strict=True))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two gateways, and a model with two replicas."""
    folder = tmp_path_factory.mktemp("thirty")
    first = partial(words, model="chat", step_ms=STEP_MS)
    with serving(folder, "e2e-rollouts", MODEL, first, processes=GATEWAYS) as cluster:
        yield cluster
        assert cluster.stop() == 0
        assert cluster.pids() == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", MOMENTS)
def test_consecutive_rollouts_with_faults_cause_no_client_errors(cluster: Cluster, moment: str) -> None:
    rng = random.Random(moment)
    extra = rng.choices(FAULTS, k=TIMES[moment] - len(FAULTS))
    both = words(cluster.file, "chat", step_ms=STEP_MS), words(cluster.file, "chat", **OTHER)
    plan = CANARY if moment.startswith("comparing") else AT_ONCE

    async def main() -> None:
        port = cluster.gateway_port
        texts = await undisturbed(port, "chat", STORIES)
        async with loading(port, "chat", texts) as load, rolling.watching(cluster, "chat", REPLICAS) as watch:
            rolls = Rolls(cluster, load, watch, both)
            for fault in FAULTS:
                await rolls.roll(moment, fault, CANARY)
            for fault in extra:
                await rolls.roll(moment, fault, plan)
        assert load.bad() == []

    cluster.wait_ready(60)
    asyncio.run(main())
    wait_quiet(run_folder(cluster) / "peers", [each["url"] for each in cluster.ready_replicas("chat")])
    never_to_the_unready(cluster)
    wait_for("no other process is left", lambda: len(cluster.pids()) == GATEWAYS + REPLICAS)
