"""Replicas that hang or slow down: their streams resume elsewhere, and traffic moves away from them."""

import asyncio

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.faults.conftest import Texts
from tests.e2e.faults.grounds import (
    SIZES,
    Replica,
    aside,
    healed,
    private_urls,
    run_folder,
    samples,
    slowed,
    stopped,
    total,
)
from tests.e2e.faults.load import CLIENTS, Load, loading

SLOW = 4.0
"""The handicap of a replica that is called slow. One that came a moment ago may have as much."""


async def busiest(cluster: Cluster, model: str, load: Load) -> Replica:
    """The replica that most clients are at."""
    await load.more(CLIENTS)
    ((id, _),) = load.shares(CLIENTS).most_common(1)
    return next(each for each in cluster.ready_replicas(model) if each["id"] == id)


@pytest.mark.parametrize("model", ["duo", "quad"])
def test_worker_stopped_for_seconds_causes_no_client_errors(cluster: Cluster, texts: Texts, model: str) -> None:
    peers = run_folder(cluster) / "peers"

    def moved() -> float:
        """Clients ask in step: what has no first event yet when the worker stops is asked again, not resumed."""
        names = "forebay_resumes_total", "forebay_retries_total"
        return sum(total(peers, name, f'model="{model}"', 'reason="lost"') for name in names)

    async def main() -> None:
        before = moved()
        async with loading(cluster.gateway_port, model, texts[model]) as load:
            victim = await busiest(cluster, model, load)
            with stopped(victim["pid"]):
                await aside("what was there goes on elsewhere", lambda: moved() > before)
                await load.until("nothing begins there", lambda: victim["id"] not in load.shares(CLIENTS))
            await load.more(CLIENTS)
        assert load.bad() == []

    asyncio.run(main())
    healed(cluster, model, texts[model])


@pytest.mark.parametrize("model", ["duo", "quad"])
def test_slow_replica_loses_most_of_its_clients(cluster: Cluster, texts: Texts, model: str) -> None:
    """Shares are of clients, by their last answers: by requests, a slow replica always has a small one."""
    peers = run_folder(cluster) / "peers"
    few = CLIENTS // SIZES[model] // 2

    async def main() -> None:
        def called_slow() -> bool:
            rows = [each for url in private_urls(peers) for each in samples(url).items()]
            row = f'replica="{victim["id"]}"'
            return any(k.startswith("forebay_replica_handicap") and row in k and v >= SLOW for k, v in rows)

        async with loading(cluster.gateway_port, model, texts[model]) as load:
            victim = await busiest(cluster, model, load)
            with slowed(victim["pid"], victim["engine_pid"]):
                if (
                    model == "duo"
                ):  # of four, the three others soon look so much better that there is nothing to judge
                    await aside("a gateway calls it slow", called_slow)
                for _ in range(2):
                    await load.more(CLIENTS)
                    await load.until("few are left there", lambda: load.last()[victim["id"]] <= few)
        assert load.bad() == []

    asyncio.run(main())
    healed(cluster, model, texts[model])
