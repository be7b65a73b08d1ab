"""The estimate against what replicas of the demo models really use with full caches (PSS of their processes)."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.contract.conftest import bge_small, model_home, smollm2_gguf

from forebay.core.model import Endpoint, LoadReport, ReplicaState, Task, WorkerSpec
from forebay.engines.prepare import prepare
from forebay.engines.sizing.estimate import estimate
from forebay.providers.footprint import used_bytes

__all__ = ["bge_small", "model_home", "smollm2_gguf"]
pytestmark = pytest.mark.slow
MARGIN = 0.25
"""The estimate may be off by this share of what is measured."""
START_S = 120.0
SETTINGS: dict[str, dict[str, int | float | str | bool]] = {
    "openvino": {"kv_cache_tokens": 2048},
    "llamacpp": {"kv_cache_tokens": 4096},
    "onnx": {"threads": 1},
    "synthetic": {"task": "chat"},
}


@contextmanager
def running(folder: Path, spec: WorkerSpec) -> Iterator[tuple[int, httpx.Client]]:
    """A worker that is ready: its pid, and a client for it."""
    file = folder / "spec.json"
    file.write_bytes(msgspec.json.encode(spec))
    process = subprocess.Popen([sys.executable, "-m", "forebay.worker", str(file)])
    try:
        until = time.monotonic() + START_S
        while not Path(spec.endpoint_path).exists() and time.monotonic() < until:
            time.sleep(0.05)
        at = msgspec.json.decode(Path(spec.endpoint_path).read_bytes(), type=Endpoint)
        with httpx.Client(base_url=f"http://{at.host}:{at.port}", timeout=START_S) as client:
            while time.monotonic() < until:
                report = msgspec.json.decode(client.get("/load").content, type=LoadReport)
                if report.state is ReplicaState.READY:
                    break
                time.sleep(0.05)
            yield process.pid, client
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


@pytest.mark.parametrize("engine", ["openvino", "llamacpp", "onnx", "synthetic"])
def test_a_replica_uses_what_was_estimated(
    engine: str, tmp_path: Path, model_home: Path, request: pytest.FixtureRequest
) -> None:
    fixture = {"openvino": "smollm2_gguf", "llamacpp": "smollm2_gguf", "onnx": "bge_small"}.get(engine)
    source = request.getfixturevalue(fixture) if fixture else Path("synthetic")
    if engine == "llamacpp":  # a file of its own: pages that others have mapped too would count less
        source = Path(shutil.copy(source, tmp_path / "model.gguf"))
    settings = SETTINGS[engine]
    artifact = prepare(engine, source, settings, model_home / "cache", lambda *_: None)
    task = Task.EMBED if engine == "onnx" else Task.CHAT
    spec = WorkerSpec(
        "m-0", 1, "m", "r-1", task, engine, str(artifact), str(tmp_path / "endpoint.json"), port_first=18_900,
        settings=settings,
    )  # fmt: skip
    with running(tmp_path, spec) as (pid, client):
        if engine == "onnx":
            client.post("/v1/embeddings", json={"model": "m", "input": ["word " * 400] * 4}).raise_for_status()
        for number in range(2 if engine == "openvino" else 0):  # its cache grows as it is used
            asked = {"model": "m", "prompt": f"{number} " + "word " * 900, "max_tokens": 1}
            client.post("/v1/completions", json=asked).raise_for_status()
        used = used_bytes([pid, os.getpid()])[pid]
    estimated = estimate(engine, str(artifact), settings, 0).total_bytes
    assert estimated == pytest.approx(used, rel=MARGIN), f"{estimated / 2**20:.0f} MiB, really {used / 2**20:.0f}"
