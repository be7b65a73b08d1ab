"""Processes of a cluster under load are killed: clients see no error, unless their own gateway was killed."""

import asyncio
import os
import signal
from typing import Any

import pytest
from tests.e2e.cluster import Cluster, alive, launch
from tests.e2e.faults.conftest import Texts
from tests.e2e.faults.grounds import aside, born_later, healed, stopped
from tests.e2e.faults.load import CLIENTS, loading


@pytest.mark.parametrize("model", ["duo", "quad"])
def test_killed_worker_and_killed_engine_cause_no_client_errors(cluster: Cluster, texts: Texts, model: str) -> None:
    async def main() -> None:
        first, second, *_ = cluster.ready_replicas(model)
        async with loading(cluster.gateway_port, model, texts[model]) as load:
            os.kill(first["pid"], signal.SIGKILL)
            await aside("a successor is ready", lambda: born_later(cluster, model, first))
            await load.streaming(4)
            os.kill(second["engine_pid"], signal.SIGKILL)
            await aside(
                "a new engine in the same worker",
                lambda: any(
                    r["pid"] == second["pid"]
                    for r in cluster.ready_replicas(model)
                    if r["id"] == second["id"] and r["engine_pid"] not in (None, second["engine_pid"])
                ),
            )
            await load.more(16)
        assert load.bad() == []

    asyncio.run(main())
    healed(cluster, model, texts[model])


def test_killed_gateway_fails_only_its_own_clients_and_is_restarted(cluster: Cluster, texts: Texts) -> None:
    def is_back(victim: dict[str, Any]) -> bool:
        seen = cluster.status()["gateways"][1]
        return seen["state"] == "ready" and seen["pid"] not in (None, victim["pid"])

    async def main() -> None:
        victim = cluster.status()["gateways"][1]
        async with loading(cluster.gateway_port, "quad", texts["quad"]) as load:
            await load.until("every client knows its gateway", lambda: len({e.client for e in load.seen}) == CLIENTS)
            os.kill(victim["pid"], signal.SIGKILL)
            killed_at = len(load.seen)
            await load.until("its clients notice", lambda: bool(load.bad()))
            await aside("it is back", lambda: is_back(victim))
            back_at = len(load.seen)
            await load.more(24)
        bad = load.bad()
        killed = {each.gateway for each in bad} - {""}
        cut = {each.client for each in bad if each.gateway in killed}
        assert len(killed) == 1
        assert all(each.error.startswith("cut") and killed_at <= each.number < back_at for each in bad)
        assert {
            each.client for each in bad
        } == cut  # others were not even hindered; these may have come back too soon
        assert killed.isdisjoint(each.gateway for each in load.seen[back_at:])

    asyncio.run(main())
    healed(cluster, "quad", texts["quad"])


def test_simultaneous_stop_and_kill_of_replicas_cause_no_client_errors(cluster: Cluster, texts: Texts) -> None:
    async def main() -> None:
        first, second, *_ = cluster.ready_replicas("quad")
        async with loading(cluster.gateway_port, "quad", texts["quad"]) as load:
            with stopped(first["pid"]):
                os.kill(second["pid"], signal.SIGKILL)
                await aside("a successor is ready", lambda: born_later(cluster, "quad", second))
                await load.more(16)
        assert load.bad() == []

    asyncio.run(main())
    healed(cluster, "quad", texts["quad"])


def test_traffic_continues_without_control_and_control_recovers(cluster: Cluster, texts: Texts) -> None:
    async def main() -> None:
        victim, survivor = cluster.ready_replicas("duo")
        async with loading(cluster.gateway_port, "duo", texts["duo"]) as load:
            cluster.process.kill()
            cluster.process.wait()
            await load.more(8)
            os.kill(victim["pid"], signal.SIGKILL)  # nobody is there to replace it
            await load.more(16)
            # what had begun there has its name, although it has gone on elsewhere
            await load.until("only the other one is asked", lambda: set(load.shares(CLIENTS)) == {survivor["id"]})
            again = launch(cluster.file, cluster.name, (cluster.gateway_port, cluster.admin_port), cluster.home)
            cluster.process = again.process
            await aside("a successor is ready", lambda: born_later(cluster, "duo", victim))
            await load.more(8)
        assert load.bad() == []
        assert survivor["pid"] in [each["pid"] for each in cluster.ready_replicas("duo")]
        await aside("its engine is gone, too", lambda: not alive(victim["engine_pid"]))

    asyncio.run(main())
    healed(cluster, "duo", texts["duo"])
