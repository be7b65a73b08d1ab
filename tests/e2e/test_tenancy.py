"""Keys and limits in a running cluster with two gateway processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.e2e.cluster import TEST_HOME, Cluster, launch, wait_for, write_file

LIMIT = 40
MODEL = {"name": "chat", "task": "chat", "source": "synthetic", "engine": {"name": "synthetic", "step_ms": 1}}
TEAM = {"name": "team", "models": ["chat"], "limits": {"requests_per_min": LIMIT}}


def forebay(cluster: Cluster, *words: str) -> str:
    """What a command of the cluster's folder prints."""
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cli.main", *words],
        cwd=cluster.file.parent,
        env={**os.environ, "FOREBAY_HOME": str(cluster.home), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask(cluster: Cluster, key: str) -> int:
    """The status of one request on a connection of its own, so that either gateway may get it."""
    body: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{cluster.url}/v1/chat/completions", json=body, headers=headers, timeout=30).status_code


def test_gateways_share_a_tenant_limit_and_reject_revoked_keys(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    ports = write_file(path, "tenancy", [MODEL], processes=2, auth="keys")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"tenants": [TEAM]}))
    cluster = launch(path, "tenancy", ports, TEST_HOME)
    try:
        cluster.wait_ready()
        key = next(
            line for line in forebay(cluster, "keys", "create", "--tenant", "team").splitlines() if "fb-" in line
        )
        key = key.strip()
        statuses: list[int] = []

        def known() -> bool:
            statuses.extend(ask(cluster, key) for _ in range(4))
            return statuses[-4:] == [200] * 4

        wait_for("both gateways know the key", known)
        statuses += [ask(cluster, key) for _ in range(LIMIT * 2)]
        assert {200, 429} <= set(statuses) <= {200, 401, 429}
        assert LIMIT // 2 <= statuses.count(200) <= LIMIT

        gateways = [(row["id"], row["pid"]) for row in cluster.status()["gateways"]]
        document = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump(document | {"tenants": [TEAM | {"limits": {}}]}))
        assert "replaced" not in forebay(cluster, "reload")
        wait_for("no limit any more", lambda: [ask(cluster, key) for _ in range(8)] == [200] * 8, 20)
        assert [(row["id"], row["pid"]) for row in cluster.status()["gateways"]] == gateways

        rows = json.loads(forebay(cluster, "keys", "list", "--json"))  # those of earlier runs too
        (id,) = (row["id"] for row in rows if key.startswith(f"fb-{row['id']}-"))
        forebay(cluster, "keys", "revoke", id)
        wait_for("the key is refused", lambda: {ask(cluster, key) for _ in range(6)} == {401}, 20)
        assert "team" in forebay(cluster, "usage", "--json")
    finally:
        cluster.stop()
