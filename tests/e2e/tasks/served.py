"""Demo models behind a real `forebay serve --repository`, and requests to them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
from tests.e2e.cluster import TEST_HOME, free_ports, wait_for

T = TypeVar("T")

START_TIMEOUT_S = 120.0
AT_ONCE = 8
FOREBAY = (sys.executable, "-m", "forebay.cli.main")


@dataclass
class Served:
    """A model server."""

    http_port: int
    grpc_port: int
    repository: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def post(self, path: str, **fields: Any) -> Any:
        """The JSON that a JSON body is answered with; the answer has to be a success."""
        answer = httpx.post(self.url + path, json=fields, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and error object that a JSON body is answered with."""
        answer = httpx.post(self.url + path, json=fields, timeout=120)
        return answer.status_code, answer.json()["error"]

    def openai(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def batches(self, model: str) -> dict[int, int]:
        """How many executions there have been of each batch size."""
        (found,) = httpx.get(f"{self.url}/v2/models/{model}/stats").json()["model_stats"]
        return {each["batch_size"]: each["compute_infer"]["count"] for each in found["batch_stats"]}


def at_once(ask: Callable[[int], T], count: int = AT_ONCE) -> list[T]:
    """What several threads get that ask at the same time."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


@contextmanager
def serving(folder: Path, models: Sequence[str], *options: str) -> Iterator[Served]:
    """Write the models into a repository and serve it; stopped at the end. Weights are kept for the next time."""
    environment = {**os.environ, "FOREBAY_HOME": str(TEST_HOME), "NO_COLOR": "1"}
    repository = folder / "repository"
    made = subprocess.run(
        [*FOREBAY, "repository", "demo", str(repository), *models],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with serving_repository(folder, repository, *options) as served:
        yield served


@contextmanager
def serving_repository(folder: Path, repository: Path, *options: str) -> Iterator[Served]:
    """Serve a repository; stopped at the end. What the server says is in `folder`."""
    environment = {**os.environ, "FOREBAY_HOME": str(TEST_HOME), "NO_COLOR": "1"}
    ports = free_ports(3)
    words = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    output = folder / "output"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [*FOREBAY, "serve", "--repository", str(repository), *words, *options],
            env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    served = Served(ports[0], ports[1], repository)

    def ready() -> bool:
        assert process.poll() is None, output.read_text(errors="replace")
        return httpx.get(f"{served.url}/v2/health/ready", timeout=5).status_code == 200

    try:
        wait_for("the model server is ready", ready, START_TIMEOUT_S)
        yield served
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
