"""A replica of the demo's chat model that is partitioned from control, in a network namespace of its own.

Clients see no error, and the replica stops itself."""

import asyncio
from pathlib import Path

import pytest
from tests.e2e.availability.fresh_cluster import fresh_cluster
from tests.e2e.availability.networks import Network, needs_networks, network
from tests.e2e.availability.witness import Taken, observed, taken, twice
from tests.e2e.cluster import CHAT, Cluster, alive
from tests.e2e.faults.grounds import STORIES, aside, routes, stopped
from tests.e2e.faults.load import CLIENTS, Load, Patient, loading

LEASE_S = 3.0
MODEL = {**CHAT, "replicas": 2}
TEXTS: dict[int, str | None] = dict.fromkeys(range(STORIES))
"""What a real model says again may be another text."""
START_S = 120.0
"""For a replica to start, on a machine that is busy."""


@needs_networks
def test_partitioned_replica_stops_itself_and_no_request_reaches_two_generations(tmp_path: Path) -> None:
    notes = tmp_path / "taken"
    with network() as far:
        nodes = [observed({"name": "near"}, notes), observed(far.node("far"), notes)]
        with fresh_cluster(
            tmp_path, "e2e-cut-off", MODEL, nodes=nodes, control={"replica_lease_s": LEASE_S}
        ) as cluster:
            victim = next(each["id"] for each in cluster.ready_replicas("chat") if far.host in each["url"])
            load = asyncio.run(cut(cluster, far, victim))
    everything = taken(notes)
    generations = {each.generation for each in everything if each.replica == victim}
    assert 1 in generations, "it has served before"
    assert len(generations) > 1, "and another one in its place"
    assert len({each.request for each in everything}) >= len(load.seen), "all that were answered had been taken"
    replicas = {(each.request, each.replica) for each in everything}
    assert len(replicas) > len({each.request for each in everything}), "some went on at the other replica"
    assert twice(everything) == []


async def cut(cluster: Cluster, far: Network, victim: str) -> Load:
    """Cut the cable while control stands still: nobody but the replica itself can stop it."""
    port = cluster.gateway_port
    pid = next(each["pid"] for each in cluster.replicas("chat") if each["id"] == victim)
    async with loading(port, "chat", TEXTS, Patient) as load:
        await load.until("it serves", lambda: victim in load.shares(CLIENTS))
        with stopped(cluster.process.pid):
            far.cut()
            await load.until("nobody is there", lambda: victim not in load.shares(CLIENTS))
            await aside("it has stopped itself", lambda: not alive(pid), 20 * LEASE_S)
        await load.more(CLIENTS)
        await load.until(
            "gateways are told that it is gone",
            lambda: far.host not in {each.host for each in routes(cluster, "chat").replicas},
        )
        far.mend()
        await aside("both serve", lambda: len(cluster.ready_replicas("chat")) == MODEL["replicas"], START_S)
        assert any("control.replica_lease_s" in each["last_words"] for each in cluster.replicas("chat"))
        await load.until("both get requests", lambda: len(load.last()) == MODEL["replicas"])
    assert load.bad() == []
    return load


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        ([("a", 1, "x"), ("b", 1, "x"), ("a", 2, "y"), ("a", 2, "z")], []),
        ([("a", 1, "x"), ("a", 2, "y"), ("a", 2, "x")], [("a", 2, "x")]),
        ([("a", 1, "x"), ("a", 2, "y"), ("a", 1, "z")], [("a", 1, "z")]),
    ],
)
def test_requests_taken_by_two_generations_are_detected(
    seen: list[tuple[str, int, str]], wrong: list[tuple[str, int, str]]
) -> None:
    assert twice([Taken(*each) for each in seen]) == [Taken(*each) for each in wrong]
