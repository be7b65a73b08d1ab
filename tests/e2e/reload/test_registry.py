"""A registered model under load: an alias moves to another revision, and no request fails."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import openai
import yaml
from tests.e2e.cluster import EMBED, TEST_HOME, Cluster, launch, wait_for, write_file

CLIENTS = 4


def forebay(path: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "FOREBAY_HOME": str(TEST_HOME), "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def add(path: Path, threads: int) -> str:
    more = ("--set", f"engine.threads={threads}", "-f", str(path), "--json")
    document = json.loads(forebay(path, "registry", "add", "embed", str(EMBED["source"]), "--task", "embed", *more))
    return str(document["revision"]["id"])


def served(cluster: Cluster) -> set[str]:
    return {str(replica["revision"]) for replica in cluster.ready_replicas("embed")}


def ask(cluster: Cluster, over: threading.Event, failures: list[str], answers: list[str]) -> None:
    with cluster.client() as client:
        while not over.is_set():
            try:
                answer = client.embeddings.with_raw_response.create(model="embed", input="turbines")
                answers.append(str(answer.headers["x-forebay-model-revision"]))
            except openai.OpenAIError as error:
                failures.append(str(error))


def test_moving_an_alias_under_load_fails_no_request(tmp_path: Path) -> None:
    path = tmp_path / "e2e-registry.yaml"
    model = {"name": "embed", "task": "embed", "source": "registry:embed@champion", "replicas": 2}
    ports = write_file(path, "e2e-registry", [model])
    document = yaml.safe_load(path.read_text()) | {
        "store": f"sqlite:///{tmp_path}/store.db",
        "registry": {"folder": str(tmp_path / "registry"), "key_file": str(tmp_path / "registry.key")},
    }
    path.write_text(yaml.safe_dump(document))
    first, second = add(path, 1), add(path, 2)
    forebay(path, "registry", "alias", f"embed@{first}", "champion", "-f", str(path))

    over, failures, answers = threading.Event(), list[str](), list[str]()
    cluster = launch(path, "e2e-registry", ports)
    threads = [threading.Thread(target=ask, args=(cluster, over, failures, answers)) for _ in range(CLIENTS)]
    try:
        cluster.wait_ready()
        assert served(cluster) == {first}
        for thread in threads:
            thread.start()
        forebay(path, "registry", "alias", f"embed@{second}", "champion", "-f", str(path))
        assert "embed: 2 replicas are replaced" in forebay(path, "reload", "--url", cluster.admin)
        wait_for("the second revision serves alone", lambda: served(cluster) == {second}, 120)
        seen = len(answers)
        wait_for("requests go on", lambda: len(answers) > seen + 2 * CLIENTS)
    finally:
        over.set()
        for thread in threads:
            if thread.ident:
                thread.join()
        cluster.stop()
    assert failures == []
    assert set(answers) == {first, second}
    assert answers[-1] == second
