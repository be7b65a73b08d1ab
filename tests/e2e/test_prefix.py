"""Conversations stay at the replica that caches their prefix, through whichever gateway process they come."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.cluster import Cluster, running, wait_for

TOPICS = 12
LONG = "The history of the river and of all its mills. " * 60
MODEL = {
    "name": "chat",
    "task": "chat",
    "source": "synthetic",
    "replicas": 4,
    "routing": "prefix_affinity",  # by price a slow machine may find another replica cheaper, and be right
    "engine": {"name": "synthetic", "step_ms": 1, "prefill_tokens_per_s": 4000},
}


def ask(cluster: Cluster, *turns: str) -> tuple[str, str, int]:
    """One chat on a connection of its own, so that any gateway may get it: its id, its replica, its cached tokens."""
    body: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": t} for t in turns]}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json={**body, "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", 0)
    return answer.headers["x-request-id"], answer.headers["x-forebay-replica"], cached


def gateway_of(cluster: Cluster, request_id: str) -> str:
    """Which gateway has a request on record. Each writes its records down once a second."""

    def probe() -> str:
        for path in sorted((cluster.home / "run" / cluster.name / "records").glob("*/*")):
            if path.is_file() and request_id.encode() in path.read_bytes():
                return path.parent.name
        return ""

    return wait_for(f"a record of {request_id}", probe, 20)


def let_all_hear(cluster: Cluster) -> None:
    """Return when each gateway has asked its replicas what they hold, which it does several times between records."""
    for _ in range(2):  # what is asked once the first record was seen, is in a later one
        heard: set[str] = set()
        while len(heard) < 2:
            asked = [ask(cluster, "Hello?")[0] for _ in range(8)]
            heard |= {gateway_of(cluster, id) for id in asked}


def all_up(cluster: Cluster, old: set[int]) -> bool:
    """Whether two new gateways listen and have heard of every replica."""
    peers = (cluster.home / "run" / cluster.name).glob("**/peers/*.json")
    pids = {json.loads(path.read_bytes())["pid"] for path in peers}
    up = [value for name, value in cluster.metrics().items() if name.startswith("forebay_replica_up")]
    return len(pids) == 2 and not pids & old and up == [1.0] * 8


def test_next_turn_reaches_its_cached_replica_through_any_gateway(tmp_path: Path) -> None:
    with running(tmp_path, "e2e-prefix", [MODEL], processes=2) as cluster:
        firsts = [ask(cluster, f"{topic} {LONG}") for topic in range(TOPICS)]
        came_by = [gateway_of(cluster, id) for id, _, _ in firsts]
        assert len({home for _, home, _ in firsts}) > 1
        let_all_hear(cluster)

        seconds = [ask(cluster, f"{topic} {LONG}", "And then?") for topic in reversed(range(TOPICS))][::-1]
        went_by = [gateway_of(cluster, id) for id, _, _ in seconds]
        assert any(first != second for first, second in zip(came_by, went_by, strict=True))
        assert [home for _, home, _ in seconds] == [home for _, home, _ in firsts]
        assert all(cached > 0 for _, _, cached in seconds)

        old = {gateway["pid"] for gateway in cluster.status()["gateways"]}
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        wait_for("new gateways that know all replicas", lambda: all_up(cluster, old))
        thirds = [ask(cluster, f"{topic} {LONG}", "And then?") for topic in reversed(range(TOPICS))][::-1]
        assert [home for _, home, _ in thirds] == [home for _, home, _ in firsts]
