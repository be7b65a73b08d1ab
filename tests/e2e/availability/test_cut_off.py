"""A replica that is cut off, in a network namespace of its own: clients notice nothing, and it stops itself."""

import asyncio
from pathlib import Path

from tests.e2e.availability.having import having
from tests.e2e.availability.networks import Network, needs_networks, network
from tests.e2e.cluster import Cluster, alive
from tests.e2e.faults.grounds import STORIES, SYNTHETIC, aside, routes, stopped
from tests.e2e.faults.load import CLIENTS, loading, undisturbed

LEASE_S = 3.0
MODEL = {"name": "chat", "replicas": 2, **SYNTHETIC}


@needs_networks
def test_a_replica_that_is_cut_off_stops_itself_and_nobody_is_sent_to_it(tmp_path: Path) -> None:
    with network() as far:
        more = {"nodes": [{"name": "near"}, far.node("far")], "control": {"replica_lease_s": LEASE_S}}
        with having(tmp_path, "e2e-cut-off", MODEL, **more) as cluster:
            asyncio.run(cut(cluster, far))


async def cut(cluster: Cluster, far: Network) -> None:
    """Cut the cable while control stands still: nobody but the replica itself can stop it."""
    port = cluster.gateway_port
    victim = next(each for each in cluster.ready_replicas("chat") if far.host in each["url"])
    texts = await undisturbed(port, "chat", STORIES)
    async with loading(port, "chat", texts) as load:
        await load.until("it serves", lambda: victim["id"] in load.shares(CLIENTS))
        with stopped(cluster.process.pid):
            far.cut()
            await load.until("nobody is there", lambda: victim["id"] not in load.shares(CLIENTS))
            await aside("it has stopped itself", lambda: not alive(victim["pid"]), 20 * LEASE_S)
        await load.more(CLIENTS)
        assert far.host not in {each.host for each in routes(cluster, "chat").replicas}
        far.mend()
        await aside("both serve", lambda: len(cluster.ready_replicas("chat")) == MODEL["replicas"])
        assert any("control.replica_lease_s" in each["last_words"] for each in cluster.replicas("chat"))
        await load.until("both get requests", lambda: len(load.last()) == MODEL["replicas"])
    assert load.bad() == []
