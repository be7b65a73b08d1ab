"""The command line as a process, and a fake server for it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.cli.fake_server import FakeServer, fake_server
from typer.main import get_command

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session", autouse=True)
def one_tree_of_commands() -> Iterator[None]:
    """Typer would make it anew for every call, which takes longer than most calls do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(get_command))
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """A server for all tests of a file; its records are emptied by whoever reads them."""
    with fake_server() as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `forebay` in an empty folder and returns what it said."""

    def run_cli(*words: str, stdin: str | None = None, **environ: str) -> "subprocess.CompletedProcess[str]":
        known = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
        return subprocess.run(
            [sys.executable, "-m", "forebay.cli.main", *words],
            cwd=tmp_path,
            env={**known, "NO_COLOR": "1", "TERM": "dumb", **environ},
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run_cli
