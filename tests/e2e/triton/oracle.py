"""The real Triton 2.51, as `scripts/oracle` installs it, with the models of the conformance suite."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.e2e.cluster import POLL_S, REPO, free_ports, wait_for

from forebay.cli.conformance import repository

FOLDER = Path(os.environ.get("FOREBAY_ORACLE", REPO / ".forebay/oracle"))
PACKAGES = FOLDER / "triton/lib/python3.10/site-packages"
TRITON = PACKAGES / "pytriton/tritonserver"


@dataclass(frozen=True, slots=True)
class Oracle:
    """Where it answers."""

    url: str
    grpc: str
    metrics: str
    again: threading.Event

    def restart(self) -> None:
        """Kill it; a moment after this has returned there is a new one."""
        self.again.set()
        wait_for("the killed one is gone", lambda: not self.again.is_set())


def missing() -> str:
    """Why the oracle cannot be started; empty: it can."""
    there = (TRITON / "backends/python/triton_python_backend_stub").exists()
    return "" if there else "Triton is not there: scripts/oracle installs it"


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Oracle]:
    """Triton without a model: they are loaded by the load API. Its log is `folder/oracle.log`."""
    models = folder / "models"
    repository.write(models)
    http, grpc, metrics = free_ports(3)
    python = (FOLDER / "triton/bin/python").resolve().parents[1]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{PACKAGES / 'nvidia_pytriton.libs'}:{python / 'lib'}",
        "PYTHONPATH": str(PACKAGES),
    }
    settings = {
        "model-repository": models,
        "backend-directory": TRITON / "backends",
        "cache-directory": TRITON / "caches",
        "cache-config": "local,size=16777216",
        "rate-limit": "execution_count",
        "model-control-mode": "explicit",
        "http-address": "127.0.0.1",
        "http-port": http,
        "grpc-address": "127.0.0.1",
        "grpc-port": grpc,
        "metrics-address": "127.0.0.1",
        "metrics-port": metrics,
    }
    command = [str(TRITON / "bin/tritonserver"), *(f"--{key}={value}" for key, value in settings.items()), *arguments]
    again, ended = threading.Event(), threading.Event()
    urls = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"http://127.0.0.1:{metrics}/metrics"
    triton = Oracle(*urls, again)
    starts = threading.Thread(target=_run, args=(command, environment, folder / "oracle.log", again, ended))
    starts.start()
    try:
        wait_for("Triton is ready", lambda: httpx.get(f"{triton.url}/v2/health/ready").status_code == 200, 60)
        yield triton
    finally:
        ended.set()
        again.set()
        starts.join()


def _run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, again: threading.Event, ended: threading.Event
) -> None:
    """Run it until `ended`; start it anew when it ends by itself, as some requests make it, or when told so."""
    while not ended.is_set():
        again.clear()
        with log.open("ab") as stream:
            process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
        while process.poll() is None and not again.wait(POLL_S):
            pass
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes of its models, which outlive a crash
        process.wait()
