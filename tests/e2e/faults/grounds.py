"""The shared cluster of the fault tests (two gateways, models with two and four replicas): faults, probes, waits."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.e2e.cluster import PLAIN, Cluster, wait_for
from tests.e2e.faults.load import Load, burst

from forebay.core.model import Endpoint, ModelRoutes, Snapshot

T = TypeVar("T")

SIZES = {"duo": 2, "quad": 4}
GATEWAYS = 2
STORIES = 8
BURST = 8
"""Times all stories at once are more than some replicas take without waiting."""
HEAL_S = 60.0
SYNTHETIC = {"task": "chat", "source": "synthetic", "engine": {"name": "synthetic", "step_ms": 20}}
MODELS = [{"name": name, "replicas": size, **SYNTHETIC} for name, size in SIZES.items()]
BUSY = (
    *("forebay_in_flight", "forebay_queue_depth", "forebay_resume_text_bytes"),
    *("forebay_replica_in_flight", "forebay_replica_queue_tokens"),
)
"""Gauges that are zero when nobody asks for anything."""

Replica = dict[str, Any]


async def aside(what: str, probe: Callable[[], T], timeout_s: float = 60.0) -> T:
    """`wait_for` that lets the clients go on."""
    return await asyncio.to_thread(wait_for, what, probe, timeout_s)


def run_folder(cluster: Cluster) -> Path:
    """Where control keeps the snapshot, and gateways say where they are."""
    return cluster.home / "run" / cluster.name


def routes(cluster: Cluster, model: str) -> ModelRoutes:
    """What the gateways know of a model."""
    snapshot = msgspec.json.decode((run_folder(cluster) / "snapshot.json").read_bytes(), type=Snapshot)
    return next(each for each in snapshot.models if each.name == model)


def private_urls(peers: Path) -> list[str]:
    """Of each gateway process, where it answers for itself alone."""
    found = [msgspec.json.decode(path.read_bytes(), type=Endpoint) for path in sorted(peers.glob("*.json"))]
    return [f"http://{each.host}:{each.port}" for each in found]


def samples(url: str) -> dict[str, float]:
    """The samples of one process by `name{labels}`."""
    lines = (line.rsplit(" ", 1) for line in PLAIN.get(f"{url}/metrics", timeout=5).text.splitlines())
    return {line[0]: float(line[1]) for line in lines if not line[0].startswith("#")}


def total(peers: Path, name: str, *labels: str) -> float:
    """The sum of a metric over all gateway processes, of rows that hold all these labels."""
    rows = [row for url in private_urls(peers) for row in samples(url).items()]
    return sum(value for key, value in rows if key.startswith(name + "{") and all(each in key for each in labels))


def busy(peers: Path, replicas: list[str]) -> dict[str, float]:
    """Whatever is under way anywhere: gauges of each gateway, load reports of each replica."""
    left = {}
    for url in private_urls(peers):
        left |= {f"{url} {key}": value for key, value in samples(url).items() if key.startswith(BUSY) and value}
    for url in replicas:
        report = PLAIN.get(f"{url}/load", timeout=5).json()
        left |= {f"{url} {key}": report[key] for key in ("in_flight", "running", "waiting") if report[key]}
    return left


def wait_quiet(peers: Path, replicas: list[str]) -> None:
    """Wait until nothing is under way, neither by the gateways' accounts nor by the replicas'."""
    wait_for("nothing is under way", lambda: not busy(peers, replicas))


async def everybody_serves(port: int, model: str, texts: dict[int, str], replicas: int, gateways: int) -> None:
    """Ask until every gateway has got a good answer from every replica.

    In bursts: what has just come back starts slowly, and gets nothing while the others have nothing to do.
    """
    load = Load(texts)
    async with asyncio.timeout(HEAL_S):
        while len({(each.gateway, each.replica) for each in load.seen}) < replicas * gateways:
            load.seen += await burst(port, model, [*texts] * BURST, stream=False)
    assert load.bad() == []


def healed(cluster: Cluster, model: str, texts: dict[int, str]) -> None:
    """Wait until the cluster is whole again, and see that everybody serves and nothing was left under way."""
    cluster.wait_ready(60)
    wait_for("all gateways are ready", lambda: len(private_urls(run_folder(cluster) / "peers")) == GATEWAYS)
    asyncio.run(everybody_serves(cluster.gateway_port, model, texts, SIZES[model], GATEWAYS))
    wait_quiet(run_folder(cluster) / "peers", [each["url"] for each in cluster.ready_replicas(model)])


def born_later(cluster: Cluster, model: str, victim: dict[str, Any]) -> list[dict[str, Any]]:
    """The victim's successor, once it is ready."""
    ready = cluster.ready_replicas(model)
    return [r for r in ready if r["id"] == victim["id"] and r["generation"] > victim["generation"]]


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that stand still meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def slowed(*pids: int, on_s: float = 0.1, off_s: float = 0.4) -> Iterator[None]:
    """Processes that run only a part of the time."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            with suppress(ProcessLookupError), stopped(*pids):  # one that is gone may have been replaced
                over.wait(off_s)
            over.wait(on_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
