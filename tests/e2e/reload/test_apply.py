"""A cluster that requires admin keys: only permitted roles change it, and history records the key's name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import yaml
from tests.e2e.cluster import Cluster, launch, wait_for, write_file

from forebay.registry.signing import own_signer

MODEL = {"name": "chat", "task": "chat", "source": "synthetic", "engine": "synthetic"}


def said(cluster: Cluster, *words: str, key: str = "", code: int = 0) -> str:
    """What a command prints, on either side; with --json only that."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    environ |= {"FOREBAY_HOME": str(cluster.home), "FOREBAY_ADMIN_URL": cluster.admin, "NO_COLOR": "1"}
    if key:
        environ["FOREBAY_ADMIN_TOKEN"] = key
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cli.main", *words], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if "--json" in words else done.stdout + done.stderr


def key(cluster: Cluster, role: str, name: str) -> str:
    words = ("keys", "create", "-f", str(cluster.file), "--admin", role, "--name", name)
    return next(line for line in said(cluster, *words).splitlines() if line.startswith("fb-"))


def test_unsigned_revision_deploys_only_after_a_remote_publisher_signs_it(tmp_path: Path) -> None:
    """With the commands alone, each in the name of somebody, and a private key that the cluster never sees."""
    publisher, model = tmp_path / "elsewhere" / "publisher.pem", tmp_path / "weights.bin"
    own_signer(publisher)
    subprocess.run(["openssl", "pkey", "-in", publisher, "-pubout", "-out", tmp_path / "publisher.pub"], check=True)
    model.write_bytes(b"weights")
    path = tmp_path / "forebay.yaml"
    ports = write_file(path, "e2e-signed", [MODEL])
    document = yaml.safe_load(path.read_text())
    document["admin"]["auth"] = "keys"
    document["registry"] = {"publishers": [str(tmp_path / "publisher.pub")]}
    path.write_text(yaml.safe_dump(document))
    cluster = launch(path, "e2e-signed", ports, tmp_path / "home")
    try:
        wait_for("the cluster is ready", lambda: httpx.get(f"{cluster.admin}/readyz", timeout=5).status_code == 200)
        ada = key(cluster, "admin", "ada")
        bob = said(cluster, "keys", "create", "--admin", "operator", "--name", "bob", key=ada).splitlines()[0]
        words = ("registry", "add", "chat", str(model), "--engine", "synthetic", "--task", "chat", "--json")
        id = json.loads(said(cluster, *words, key=bob))["revision"]["id"]
        deploy = ("deploy", "chat", "--revision", id, "--plan", "blue-green", "--unchecked")
        sign = ("registry", "sign", f"chat@{id}", "--key", str(publisher), "--files", str(model))

        assert "has no signature" in said(cluster, *deploy, key=bob, code=1)
        assert "is signed with the key" in said(cluster, *sign, key=bob)
        assert "chat:1" in said(cluster, *deploy, key=bob)
        events = json.loads(said(cluster, "history", "--json", key=bob))
        assert [(event["actor"], event["kind"]) for event in events[:4]] == [
            ("ada", "key.created"),
            ("bob", "revision.add"),
            ("bob", "artifact.signed"),
            ("bob", "rollout.started"),
        ]
    finally:
        cluster.stop()
    secret = publisher.read_bytes()
    files = [each for each in (tmp_path / "home").rglob("*") if each.is_file()]
    assert [each for each in files if secret in each.read_bytes()] == []


def test_keys_permit_actions_of_their_role_and_history_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    ports = write_file(path, "e2e-apply", [MODEL])
    document = yaml.safe_load(path.read_text())
    document["admin"]["auth"] = "keys"
    path.write_text(yaml.safe_dump(document))
    cluster = launch(path, "e2e-apply", ports, tmp_path / "home")
    try:
        wait_for("the cluster is ready", lambda: httpx.get(f"{cluster.admin}/readyz", timeout=5).status_code == 200)
        bob, eve = key(cluster, "operator", "bob"), key(cluster, "viewer", "eve")
        changed = tmp_path / "more.yaml"
        changed.write_text(yaml.safe_dump({**document, "models": [{**MODEL, "replicas": 2}]}))
        apply = ("apply", "-f", str(changed))

        assert "No key was sent" in said(cluster, *apply, code=1)
        assert "needs the role operator" in said(cluster, *apply, key=eve, code=1)
        assert "would follow: chat: 1 replica more" in said(cluster, *apply, "--dry-run", key=bob)
        assert len(json.loads(said(cluster, "status", "--json", key=eve))["models"][0]["replicas"]) == 1
        assert "~ models.chat.replicas: 1 → 2" in said(cluster, *apply, key=bob)
        assert said(cluster, *apply, key=bob) == "Nothing to change.\n"
        wait_for(
            "both replicas are ready",
            lambda: json.loads(said(cluster, "status", "--json", key=eve))["models"][0]["ready"] == 2,
        )
        assert "models.chat.replicas: 2 → 1" in said(cluster, "reload", key=bob)  # its own file counts again
        events = json.loads(said(cluster, "history", "cluster", "--url", cluster.admin, "--json", key=eve))
        assert [(event["actor"], event["kind"]) for event in events] == [
            ("bob", "cluster.applied"),
            ("bob", "cluster.reloaded"),
        ]
        said(cluster, "keys", "revoke", bob[3:11], "-f", str(path))
        assert "revoked" in said(cluster, *apply, key=bob, code=1)
    finally:
        cluster.stop()
    secrets = [each[12:].encode() for each in (bob, eve)]
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert [each for each in files if any(secret in each.read_bytes() for secret in secrets)] == []
