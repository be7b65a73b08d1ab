"""Files of a local machine are uploaded to a remote cluster's registry, though both ends are killed meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.cluster import Cluster, launch, wait_for, write_file

from forebay.wire.admin_request import BODY_BYTES_MAX

SIZE = 150_000_000
SYNTHETIC = {"name": "chat", "task": "chat", "source": "synthetic", "engine": "synthetic"}


def command(cluster: Cluster, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "forebay.cli.main", *words, "--url", cluster.admin],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )


def said(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    return out


def test_upload_resumes_after_client_and_control_are_killed(tmp_path: Path) -> None:
    home, path = tmp_path / "home", tmp_path / "e2e-upload.yaml"
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.bin").write_bytes(os.urandom(SIZE))
    ports = write_file(path, "e2e-upload", [SYNTHETIC])
    cluster = launch(path, "e2e-upload", ports, home)
    add = ("registry", "add", "chat", str(model), "--engine", "synthetic", "--task", "chat", "--json")

    def there() -> int:
        return sum(each.stat().st_size for each in (home / "registry/uploads").glob(f"*.{SIZE}"))

    try:
        cluster.wait_ready()
        first = command(cluster, *add)
        wait_for("a part has come", there)
        first.kill()
        first.communicate()
        kept = there()
        assert 0 < kept < SIZE

        second = command(cluster, *add)
        wait_for("it goes on", lambda: there() > kept + BODY_BYTES_MAX)  # one of who is gone may still be written
        cluster.process.kill()
        cluster.process.wait()
        kept = there()
        assert kept < SIZE
        cluster = launch(path, "e2e-upload", ports, home)
        revision = json.loads(said(second))["revision"]
        assert there() == 0
        assert "is unmodified" in said(command(cluster, "registry", "verify"))
        (event,) = json.loads(said(command(cluster, "history", "--json")))
        assert (event["kind"], event["why"]) == ("revision.add", "from upload:model")
        said(command(cluster, "deploy", "chat", "--revision", revision["id"], "--plan", "blue-green"))
        wait_for("it serves", lambda: {r["revision"] for r in cluster.ready_replicas("chat")} >= {revision["id"]})
    finally:
        cluster.stop()
