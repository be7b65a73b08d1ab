"""What node commands print, and where replicas are placed."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.e2e.cluster import Cluster


def said(cluster: Cluster, *words: str) -> Any:
    """What a command on nodes says as JSON."""
    command = [sys.executable, "-m", "forebay.cli.main", *words, "--url", cluster.admin, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def placed(cluster: Cluster) -> dict[str, list[str]]:
    """The slots on each node, and on each GPU."""
    nodes = said(cluster, "nodes")["nodes"]
    everything = [*nodes, *(device | {"name": device["device"]} for node in nodes for device in node["devices"])]
    return {each["name"]: sorted(each["replicas"]) for each in everything}
