"""Actions on a cluster that rolls a revision out, and probes of its state."""

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.cluster import PLAIN, Cluster, launch, wait_for
from tests.e2e.faults.grounds import routes
from tests.e2e.faults.load import Load

from forebay.core.model import ReplicaState

Standing = dict[str, Any]
Plan = dict[str, Any]

LOOK_S = 0.02
LOOSE: dict[str, Any] = {
    "errors": {"floor": 0.5},
    **{name: {"ratio": 10, "tail": None, "required": False} for name in ("ttft", "tpot", "latency")},
}
"""Tolerances for revisions that are alike, on a machine that is busy with other things."""


def canary(*steps: tuple[float, float], warm_up_s: float = 0.1, settle_s: float = 0.5) -> Plan:
    """A plan of a few seconds; steps are shares and times in seconds."""
    return {
        "kind": "canary",
        "steps": [{"share": share, "time_s": time_s} for share, time_s in steps],
        "warm_up_s": warm_up_s,
        "settle_s": settle_s,
        "start_timeout_s": 120.0,
    }


def deploy(cluster: Cluster, model: str, revision: str, plan: Plan, **more: Any) -> str:
    """Begin a rollout, whether or not its plan can decide anything; its id."""
    body = {"revision": revision, "plan": plan, "unchecked": True, **more}
    answer = httpx.post(f"{cluster.admin}/v1/models/{model}/deploy", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def command(cluster: Cluster, id: str, word: str) -> None:
    """Say something to a rollout."""
    answer = httpx.post(f"{cluster.admin}/v1/rollouts/{id}/{word}", json={"why": "a test"}, timeout=60)
    assert answer.status_code == 200, answer.text


def standing(cluster: Cluster, id: str) -> Standing:
    """How a rollout stands: of one that has ended, only the last of its model."""
    answer = PLAIN.get(f"{cluster.admin}/v1/rollouts", timeout=10)
    assert answer.status_code == 200, answer.text
    return next(each for each in answer.json()["rollouts"] if each["id"] == id)


def reached(cluster: Cluster, id: str, *phases: str, timeout_s: float = 60.0) -> Standing:
    """How a rollout stands as soon as it is in one of these phases, or has ended."""
    last: list[Standing] = []

    def probe() -> bool:
        last[:] = [standing(cluster, id)]
        return last[0]["ended"] or last[0]["phase"] in phases

    try:
        wait_for(f"{id} is {' or '.join(phases) or 'over'}", probe, timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{error}; the rollout: {last}; it said:\n{cluster.said()[-4000:]}") from None
    return last[0]


def processes(cluster: Cluster, model: str, revision: str) -> list[int]:
    """The workers of a revision."""
    return [r["pid"] for r in cluster.replicas(model) if r["revision"] == revision and r["pid"]]


def settled(cluster: Cluster, model: str, revision: str, replicas: int) -> None:
    """Wait until so many replicas of a revision serve a model, all of them are ready, and there are no others."""

    def probe() -> bool:
        seen = cluster.replicas(model)
        return [(r["revision"], r["state"]) for r in seen] == [(revision, "ready")] * replicas

    wait_for(f"{replicas} replicas of {revision} serve {model}", probe)


async def served_by(load: Load, revision: str, more: int = 8) -> None:
    """Wait until every client was last served by a revision; from then on nobody is served by another one."""

    def all_there() -> bool:
        return {each.revision for each in {each.client: each for each in load.seen}.values()} == {revision}

    await load.until(f"all are served by {revision}", all_there)
    since = len(load.seen)
    await load.more(more)
    late = [each for each in load.seen[since:] if each.asked_at >= since]
    wrong = [each for each in late if each.revision != revision]
    assert wrong == [], f"not by {revision}, after answer {since}: {wrong}"


def kill_control(cluster: Cluster) -> None:
    """`kill -9` of `forebay up`, which is then started again."""
    leave_alone(cluster)
    start_control(cluster)
    wait_for("control is back", lambda: PLAIN.get(f"{cluster.admin}/v1/rollouts", timeout=5).status_code == 200)


def leave_alone(cluster: Cluster) -> None:
    """`kill -9` of `forebay up`; all others run on."""
    cluster.process.kill()
    cluster.process.wait()


def start_control(cluster: Cluster) -> None:
    """`forebay up` once more."""
    again = launch(cluster.file, cluster.name, (cluster.gateway_port, cluster.admin_port), cluster.home)
    cluster.process = again.process


def kill_one(pids: list[int]) -> None:
    """Kill a worker, if there is one."""
    for pid in pids[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def locked(store: Path) -> Iterator[None]:
    """Nobody else can write to a store of SQLite."""
    connection = sqlite3.connect(store, isolation_level=None, timeout=20)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")
    finally:
        connection.close()


@dataclass
class Watch:
    """What the snapshot has said since this was last set anew."""

    fewest: int
    """Ready replicas, of both revisions together."""
    looks: int = 0


@asynccontextmanager
async def watching(cluster: Cluster, model: str, replicas: int) -> AsyncIterator[Watch]:
    """Look at the snapshot all the time, while the block runs."""
    watch = Watch(replicas)

    async def look() -> None:
        while True:
            seen = await asyncio.to_thread(routes, cluster, model)
            ready = sum(each.state is ReplicaState.READY for each in seen.replicas)
            watch.fewest, watch.looks = min(watch.fewest, ready), watch.looks + 1
            await asyncio.sleep(LOOK_S)

    async with asyncio.TaskGroup() as group:
        looking = group.create_task(look())
        try:
            yield watch
        finally:
            looking.cancel()
