"""Two controllers of the demo's embedding model on a real PostgreSQL: killed, stopped and resumed, cut off from it.

Requests are not affected."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml
from tests.e2e.availability.witness import observed, taken, twice
from tests.e2e.cluster import EMBED, TEST_PROCESS, Cluster, free_ports, launch, write_file
from tests.e2e.faults.embedding import Embedder
from tests.e2e.faults.grounds import STORIES, aside, run_folder
from tests.e2e.faults.load import Load, loading
from tests.store.postgres import Postgres
from tests.store.postgres import serving as postgres

LEASE_S = 3.0
REPLICAS = 3
NAME = f"e2e-controllers-{TEST_PROCESS}"
MODEL = {**EMBED, "replicas": REPLICAS}
TEXTS: dict[int, str | None] = dict.fromkeys(range(STORIES))
"""Clients compare the vectors themselves."""
CLIENTS = 8


@contextmanager
def several(folder: Path, store: str, notes: Path) -> Iterator[Callable[[int], Cluster]]:
    """Starts a control of the cluster by its number; in the end nothing is left of any."""
    path = folder / "0.yaml"
    gateway, _ = write_file(path, NAME, [MODEL])
    file = yaml.safe_load(path.read_text())
    file |= {"store": store, "control": {"controllers": "several", "lease_s": LEASE_S}}
    file |= {"nodes": [observed({"name": "here"}, notes)]}
    started: list[Cluster] = []

    def start(number: int) -> Cluster:
        [admin] = free_ports(1)
        own = folder / f"{number}.yaml"
        own.write_text(yaml.safe_dump(file | {"admin": {"port": admin}}))
        started.append(launch(own, NAME, (gateway, admin)))
        return started[-1]

    try:
        yield start
    finally:
        for cluster in started:
            cluster.kill()


def leads(cluster: Cluster) -> bool:
    """It says so, and everything runs."""
    status = cluster.status()
    return status["phase"] == "run" and all(m["ready"] == m["wanted"] for m in status["models"])


def waits(cluster: Cluster) -> bool:
    """It knows who leads."""
    status = cluster.status()
    return status["phase"] == "follow" and status["leader"] is not None


def kill_one(cluster: Cluster) -> int:
    """A replica is killed; the process that it was."""
    victim: int = cluster.ready_replicas("embed")[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    return victim


def pids(cluster: Cluster) -> list[int]:
    """The processes of all replicas; 0 for one that is still to be started."""
    return sorted(each["pid"] or 0 for each in cluster.replicas("embed"))


def has_replaced(cluster: Cluster, pid: int) -> bool:
    """This replica is gone, and all are ready."""
    ready = {each["pid"] for each in cluster.ready_replicas("embed")}
    return pid not in ready and len(ready) == REPLICAS


def epoch(cluster: Cluster) -> int:
    """Of what gateways route on."""
    document = json.loads((run_folder(cluster) / "snapshot.json").read_bytes())
    return int(document["epoch"])


def test_controller_failover_and_store_outage_fail_no_request(tmp_path: Path) -> None:
    notes = tmp_path / "taken"
    with postgres() as server, several(tmp_path, server.make("controllers"), notes) as start:
        first = start(0)
        first.wait_ready()
        second = start(1)
        load = asyncio.run(turns(first, second, start, server))
    everything = taken(notes)
    assert max(each.generation for each in everything) > 1, "some were replaced"
    assert len({each.request for each in everything}) >= len(load.seen), "all that were answered had been taken"
    assert twice(everything) == [], "no request has reached two generations of a replica"


async def turns(first: Cluster, second: Cluster, start: Callable[[int], Cluster], server: Postgres) -> Load:
    """What happens to them, under load."""
    loop = asyncio.get_running_loop()
    async with loading(first.gateway_port, "embed", TEXTS, Embedder, streams=0, whole=CLIENTS) as load:
        await aside("the second one waits", lambda: waits(second))
        epochs = [epoch(first)]
        first.process.kill()
        await aside("it leads", lambda: leads(second))
        epochs.append(epoch(second))
        third = start(2)
        await aside("another one waits", lambda: waits(third))
        await load.more(CLIENTS)

        second.process.send_signal(signal.SIGSTOP)
        await aside("that leads now", lambda: leads(third))
        killed = kill_one(third)
        await aside("a replica is replaced", lambda: has_replaced(third, killed))
        before = pids(third)
        second.process.send_signal(signal.SIGCONT)
        await aside("it finds itself deposed", lambda: waits(second))
        assert second.status()["leader"]["url"] == third.admin
        refused = await asyncio.to_thread(lambda: httpx.post(f"{second.admin}/v1/reload", timeout=60))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_leader")
        assert third.admin in refused.text
        await load.more(CLIENTS)
        assert pids(third) == before
        epochs.append(epoch(third))
        assert epochs == sorted({*epochs})

        server.kill()
        await aside("it pauses", lambda: "could not be renewed" in third.status()["trouble"])
        killed = kill_one(third)
        over_at = loop.time() + 4 * LEASE_S
        await load.until("leases are over", lambda: loop.time() > over_at)
        assert epoch(third) == epochs[-1], "nobody can take over"
        await asyncio.to_thread(server.start)
        await aside(
            "somebody leads and has replaced it",
            lambda: any(leads(each) and has_replaced(each, killed) for each in (second, third)),
        )
        await load.more(CLIENTS)
    assert load.bad() == []
    return load
