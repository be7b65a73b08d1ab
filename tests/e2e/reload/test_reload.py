"""The cluster file of a running cluster changes under load: every change takes effect, and no request is lost."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.cluster import Cluster, running, wait_for

CLIENTS = 32
MODEL: dict[str, Any] = {
    "name": "chat",
    "task": "chat",
    "source": "synthetic",
    "engine": {"name": "synthetic", "step_ms": 2},
    "replicas": 2,
}


class Load:
    """Clients in a loop, half of them with streams; what goes wrong is kept."""

    def __init__(self, cluster: Cluster) -> None:
        self.failures: list[str] = []
        self.done = 0
        self.over = threading.Event()
        self._cluster = cluster
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        with self._cluster.client() as client:
            while not self.over.is_set():
                ask: dict[str, Any] = {
                    "model": "chat",
                    "messages": [{"role": "user", "content": f"client {number}"}],
                    "max_tokens": 16,
                }
                try:
                    if number % 2:
                        reasons = [
                            chunk.choices[0].finish_reason
                            for chunk in client.chat.completions.create(stream=True, **ask)
                            if chunk.choices
                        ]
                        assert reasons[-1], "a stream without an end"
                    else:
                        assert client.chat.completions.create(**ask).choices[0].finish_reason
                except Exception as error:  # whatever it is, a client has seen it
                    self.failures.append(f"{type(error).__name__}: {error}")
                with self._lock:
                    self.done += 1

    def goes_on(self) -> None:
        """Return when every client can have asked again."""
        until = self.done + 2 * CLIENTS
        wait_for("requests go on", lambda: self.done >= until)


@contextmanager
def load(cluster: Cluster) -> Iterator[Load]:
    made = Load(cluster)
    with ThreadPoolExecutor(CLIENTS) as pool:
        futures = [pool.submit(made.client, number) for number in range(CLIENTS)]
        try:
            made.goes_on()
            yield made
        finally:
            made.over.set()
            for future in futures:
                future.result()


def change(cluster: Cluster, gateway: dict[str, Any] | None = None, **settings: Any) -> str:
    """Change settings of the model, or of the gateway, and let `forebay reload` take them over; what it said."""
    document = yaml.safe_load(cluster.file.read_text())
    document["models"][0] |= settings
    document["gateway"] |= gateway or {}
    cluster.file.write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cli.main", "reload", "--url", cluster.admin],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == (1 if settings.get("replicas") == 0 else 0), done.stderr
    return done.stdout + done.stderr


def settled(cluster: Cluster, replicas: int) -> dict[str, int]:
    """The processes of the replicas by name, once there are so many and all are ready."""

    def ready() -> list[dict[str, Any]] | None:
        seen = cluster.replicas("chat")
        return seen if len(seen) == replicas and all(r["state"] == "ready" for r in seen) else None

    return {r["id"]: r["pid"] for r in wait_for(f"{replicas} replicas are ready", ready) or []}


def test_reloading_every_setting_under_load_fails_no_request(tmp_path: Path) -> None:
    with running(tmp_path, "e2e-reload", [MODEL]) as cluster:
        first = settled(cluster, 2)
        with load(cluster) as clients:
            for policy in ("round_robin", "consistent_hash"):
                assert f'→ "{policy}"' in change(cluster, routing=policy)
                clients.goes_on()
            assert settled(cluster, 2) == first

            assert "chat: 1 replica more" in change(cluster, replicas=3)
            assert settled(cluster, 3).items() > first.items()
            clients.goes_on()
            assert "chat: 1 replica less" in change(cluster, replicas=2)
            assert settled(cluster, 2) == first
            clients.goes_on()

            said = change(cluster, engine={"name": "synthetic", "step_ms": 1})
            assert "models.chat.engine.step_ms: 2.0 → 1.0" in said
            wait_for("all are replaced", lambda: not set(settled(cluster, 2).values()) & set(first.values()))
            clients.goes_on()
            assert "models[0].replicas: found 0" in change(cluster, replicas=0)
            clients.goes_on()

        assert clients.failures == []
        assert "gateway-0: is replaced" in change(cluster, {"retries_max": 2}, replicas=2)
        [new] = wait_for(
            "another gateway has taken over",
            lambda: [g for g in cluster.status()["gateways"] if g["generation"] == 2 and g["state"] == "ready"],
        )
        assert new["restarts"] == 0, "it could share the port"
        assert cluster.client().models.list().data
