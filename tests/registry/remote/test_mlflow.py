"""Models of an MLflow registry on a real server: aliases, versions, files."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.registry.sources import SourceError, obtain, parse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONTENT = {"MLmodel": b"flavors: {}\n", "data/model.onnx": bytes(range(256)) * 5_000, "data/deep/vocab.txt": b"abc"}
START_S = 120
API = "/api/2.0/mlflow"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server, and a client of it."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--serve-artifacts"]
    places = [
        "--backend-store-uri",
        f"sqlite:///{folder}/ml.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    programs = Path(sys.executable).parent
    # Its background jobs need packages that training needs, and no test needs them.
    known = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [programs / "mlflow", *words, *places], stdout=log, stderr=log, env=known, start_new_session=True
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            until = time.monotonic() + START_S
            while not _answers(client):
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                assert time.monotonic() < until, (folder / "log").read_text()[-3000:]
                time.sleep(0.2)
            yield client
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def ask(client: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    answer = client.post(f"{API}{path}", json=fields)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


@pytest.fixture
def registered(server: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> httpx.Client:
    """The server with two versions of a model, the second one of which is the champion."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(server.base_url))
    if server.get(f"{API}/registered-models/get", params={"name": "tiny"}).status_code == 200:
        return server
    ask(server, "/registered-models/create", name="tiny")
    for version in (b"1", b"2"):
        run = ask(server, "/runs/create", experiment_id="0", start_time=1)["run"]["info"]
        root = run["artifact_uri"].removeprefix("mlflow-artifacts:/")
        for path, data in {**CONTENT, "version": version}.items():
            put = server.put(f"{API}-artifacts/artifacts/{root}/model/{path}", content=data)
            assert put.status_code == 200, put.text
        ask(
            server,
            "/model-versions/create",
            name="tiny",
            source=f"{run['artifact_uri']}/model",
            run_id=run["run_id"],
        )
    ask(server, "/registered-models/alias", name="tiny", alias="champion", version="2")
    return server


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


def contents(folder: Path) -> dict[str, bytes]:
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_alias_resolves_to_a_version_and_its_files(registered: httpx.Client, tmp_path: Path) -> None:
    champion = obtain(parse("mlflow:tiny@champion"), tmp_path, quiet)
    assert contents(champion) == {**CONTENT, "version": b"2"}
    assert obtain(parse("mlflow:tiny/2"), tmp_path, quiet) == champion
    assert contents(obtain(parse("mlflow:tiny/1"), tmp_path, quiet))["version"] == b"1"


def test_interrupted_download_is_resumed(registered: httpx.Client, tmp_path: Path) -> None:
    found = obtain(parse("mlflow:tiny/1"), tmp_path, quiet)
    model = found.rename(found.with_name(f".{found.name}.part")) / "data" / "model.onnx"
    kept = bytes(600_001)  # not what lies there, so that it can be told from it
    model.with_name("model.onnx.part").write_bytes(kept)
    model.unlink()
    again = obtain(parse("mlflow:tiny/1"), tmp_path, quiet)
    assert contents(again)["data/model.onnx"] == kept + CONTENT["data/model.onnx"][len(kept) :]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("mlflow:tiny@nobody", "(?i)alias nobody not found|not found"),
        ("mlflow:tiny/9", "(?i)not found"),
        ("mlflow:nothing@champion", "(?i)not found"),
        ("mlflow:tiny", "not of the form mlflow:MODEL@ALIAS"),
        ("mlflow:", "not of the form mlflow:MODEL@ALIAS"),
    ],
)
def test_missing_model_version_or_alias_is_reported(
    registered: httpx.Client, tmp_path: Path, source: str, said: str
) -> None:
    with pytest.raises(SourceError, match=said):
        obtain(parse(source), tmp_path, quiet)


def test_missing_or_unreachable_server_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(SourceError, match="MLFLOW_TRACKING_URI has to be"):
        obtain(parse("mlflow:tiny/1"), tmp_path, quiet)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match="does not respond like an MLflow server"):
        obtain(parse("mlflow:tiny/1"), tmp_path, quiet)
