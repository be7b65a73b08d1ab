"""A real worker process on the synthetic engine, and what tests ask of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import openai

from forebay.core.model import Endpoint, LoadReport, WorkerSpec

PATIENCE_S = 20.0
T = TypeVar("T")


def until(what: str, probe: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Poll until `probe` returns something true."""
    deadline = time.monotonic() + patience_s
    last: Any = None
    while time.monotonic() < deadline:
        try:
            last = probe()
        except (httpx.HTTPError, OSError) as error:
            last = error
        else:
            if last:
                return last
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {patience_s} s; last seen: {last!r}")


class Worker:
    """One worker process."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        document = {
            "replica": "m-0",
            "generation": 1,
            "model": "m",
            "revision": "rev-1",
            "task": "chat",
            "engine": "synthetic",
            "artifact": "none",
            "endpoint_path": str(folder / "endpoint.json"),
            "port_first": 18_100,
        }
        self.spec = msgspec.convert(document | spec, WorkerSpec)
        self.log_path = folder / "log"
        spec_path = folder / "spec.json"
        spec_path.write_bytes(msgspec.json.encode(self.spec))
        with self.log_path.open("wb") as log:
            command = [sys.executable, "-m", "forebay.worker", str(spec_path)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.http = httpx.Client(timeout=PATIENCE_S)
        self._endpoint: Endpoint | None = None

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            path = Path(self.spec.endpoint_path)
            data = until("endpoint file", lambda: path.exists() and path.read_bytes())
            assert isinstance(data, bytes)
            self._endpoint = msgspec.json.decode(data, type=Endpoint)
        return self._endpoint

    @property
    def url(self) -> str:
        return f"http://{self.endpoint.host}:{self.endpoint.port}"

    def _running(self) -> bool:
        assert self.process.poll() is None, self.log()
        return True

    def load(self) -> LoadReport:
        return msgspec.json.decode(self.http.get(f"{self.url}/load").content, type=LoadReport)

    def ready(self) -> "Worker":
        until("ready", lambda: self._running() and self.http.get(f"{self.url}/readyz").status_code == 200)
        return self

    def idle(self) -> LoadReport:
        """The load once nothing is left to do."""

        def at_rest() -> LoadReport | None:
            load = self.load()
            busy = load.in_flight or load.running or load.waiting or load.kv_used_tokens
            return None if busy else load

        return until("counters back to zero", at_rest)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in self.http.get(f"{self.url}/metrics").text.splitlines():
            named = line.startswith((f"forebay_{name}{{", f"forebay_{name} "))
            if named and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    @contextlib.contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S) as client:
            yield client

    def log(self) -> str:
        return self.log_path.read_text()

    def signal_engine(self, number: int) -> int:
        """Send a signal to the engine child; its pid."""
        pid = self.load().engine_pid
        assert pid > 0, "no engine runs"
        os.kill(pid, number)
        return pid

    def stop(self) -> int:
        """Ask it to drain; the exit status."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextlib.contextmanager
def worker(folder: Path, **spec: Any) -> Iterator[Worker]:
    """A worker that is stopped at the end, whatever happens."""
    started = Worker(folder, **spec)
    try:
        yield started
    finally:
        started.stop()


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
