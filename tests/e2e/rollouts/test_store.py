"""The store is killed during a rollout: traffic continues, the rollout holds, and resumes when the store is back."""

import asyncio
from pathlib import Path

import httpx
from tests.e2e.faults.grounds import STORIES, aside
from tests.e2e.faults.load import loading, undisturbed
from tests.e2e.rollouts import rolling
from tests.e2e.rollouts.revisions import serving, words
from tests.store.postgres import serving as postgres

REPLICAS = 2
MODEL = {"name": "chat", "task": "chat", "replicas": REPLICAS, "rollout": rolling.LOOSE}
PLAN = rolling.canary((0.25, 600.0), (0.5, 600.0))


def test_rollout_holds_during_a_postgresql_outage_and_resumes_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        port, stable = cluster.gateway_port, cluster.replicas("chat")[0]["revision"]
        new = words(cluster.file, "chat", step_ms=10)
        texts = await undisturbed(port, "chat", STORIES)
        async with loading(port, "chat", texts) as load, rolling.watching(cluster, "chat", REPLICAS) as watch:
            id = await asyncio.to_thread(rolling.deploy, cluster, "chat", new, PLAN)
            before = await asyncio.to_thread(rolling.reached, cluster, id, "comparing")
            assert before["phase"] == "comparing", before

            server.kill()
            body = {"why": "a test"}
            refused = await asyncio.to_thread(
                lambda: httpx.post(f"{cluster.admin}/v1/rollouts/{id}/promote", json=body, timeout=60)
            )
            assert refused.status_code == 503, refused.text
            await load.more(40)
            rolling.leave_alone(cluster)
            rolling.start_control(cluster)
            assert await asyncio.to_thread(cluster.process.wait, 60) != 0, "it does not guess"
            await load.more(60)
            assert {each.revision for each in load.seen[-60:]} == {stable, new}, "as it was before"

            await asyncio.to_thread(server.start)
            rolling.start_control(cluster)
            await aside("it is known again", lambda: rolling.standing(cluster, id))
            end = await asyncio.to_thread(rolling.reached, cluster, id)
            assert end["phase"] == "promoted", end
            await rolling.served_by(load, new)
        assert load.bad() == []
        assert watch.fewest == REPLICAS

    with postgres() as server:
        store = server.make("rollouts")
        with serving(tmp_path, "e2e-postgres", MODEL, lambda path: words(path, "chat", step_ms=11), store) as cluster:
            asyncio.run(main())
