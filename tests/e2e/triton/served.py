"""`forebay serve --repository` with the models of the conformance suite."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.e2e.cluster import REPO, free_ports, wait_for

from forebay.cli.conformance import repository
from forebay.cli.conformance.command import SERVER_OPTIONS

STOP_TIMEOUT_S = 40
_WORDS = SERVER_OPTIONS.split()
SETTINGS = {"host": "127.0.0.1"} | {
    option.removeprefix("--"): value for option, value in zip(_WORDS[::2], _WORDS[1::2], strict=True)
}
"""As a user is told, and as the oracle has them."""


@dataclass(frozen=True, slots=True)
class Served:
    """Where it answers."""

    url: str
    grpc: str
    metrics: str


@contextmanager
def running(folder: Path) -> Iterator[Served]:
    """Forebay without a model: they are loaded by the load API. Its log is `folder/forebay.log`."""
    models = folder / "models"
    repository.write(models)
    with serving(models, folder / "forebay.log", SETTINGS) as served:
        yield served


@contextmanager
def serving(models: Path, log: Path, settings: Mapping[str, str]) -> Iterator[Served]:
    """Forebay with these models."""
    http, grpc, metrics = free_ports(3)
    ports = {"http-port": http, "grpc-port": grpc, "metrics-port": metrics}
    options = [f"--{key}={value}" for key, value in {"repository": models, **settings, **ports}.items()]
    command = [sys.executable, "-m", "forebay.cli.main", "serve", *options]
    with log.open("wb") as written:
        process = subprocess.Popen(command, cwd=REPO, env=dict(os.environ), stdout=written, stderr=written)
    served = Served(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"http://127.0.0.1:{metrics}/metrics")
    try:
        wait_for("Forebay is ready", lambda: httpx.get(f"{served.url}/v2/health/ready").status_code == 200)
        yield served
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
