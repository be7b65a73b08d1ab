"""Several `forebay up` of one cluster on a real PostgreSQL, over stand-ins: killed, stopped, resumed, terminated."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.control.test_up import REPO, WAIT_S, wait_for
from tests.control.units import kill_all
from tests.e2e.cluster import free_ports
from tests.store.postgres import Postgres, serving

from forebay.providers.processes import session_leaders

pytestmark = pytest.mark.slow
LEASE_S = 3.0


class Controls:
    """`up` processes of one cluster, each with an admin port of its own."""

    def __init__(self, folder: Path, store: str) -> None:
        self.folder = folder
        self.run = folder / "home" / "run" / "t"
        self.gateway, *self.ports = free_ports(3)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        model = {"name": "chat", "task": "chat", "source": "none", "engine": "synthetic", "replicas": 2}
        for number, port in enumerate(self.ports):
            document = {
                "name": "t",
                "store": store,
                "control": {"controllers": "several", "lease_s": LEASE_S},
                "gateway": {"port": self.gateway},
                "admin": {"port": port},
                "models": [model],
            }
            (folder / f"{number}.yaml").write_text(json.dumps(document))

    def start(self, number: int) -> subprocess.Popen[bytes]:
        file, home = str(self.folder / f"{number}.yaml"), str(self.folder / "home")
        with (self.folder / f"out{number}").open("ab") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.control.stand_in_up", file, home],
                cwd=REPO,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self.processes[number] = process
        return process

    def said(self, number: int) -> str:
        return (self.folder / f"out{number}").read_text()

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    def status(self, number: int) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url(number)}/v1/status", timeout=5).json()
        return answer

    def leads(self, number: int) -> bool:
        leader = self.status(number)["leader"]
        return bool(leader and leader["here"])

    def ready(self, number: int) -> bool:
        """It leads, and everything runs."""
        status = self.status(number)
        return bool(status["leader"] and status["leader"]["here"] and status["ready"]) and len(self.units()) == 3

    def waits(self, number: int) -> bool:
        """It has said that another one leads."""
        status = self.status(number)
        return status["phase"] == "follow" and bool(status["leader"]) and not status["leader"]["here"]

    def pid(self, number: int, unit: str) -> int | None:
        """The process of a unit by one control's status; none before it was seen."""
        pid: int | None = next(r["pid"] for r in self.status(number)["models"][0]["replicas"] if r["id"] == unit)
        return pid

    def units(self) -> list[int]:
        return sorted(pid for pid, _ in session_leaders(self.run / "units"))

    def epochs(self) -> list[str]:
        return sorted(os.listdir(self.run / "epochs"))

    def pair(self) -> None:
        """The first one leads, the second one waits."""
        self.start(0)
        wait_for(lambda: self.ready(0))
        self.start(1)
        wait_for(lambda: self.waits(1) and self.status(0)["leader"]["waiting"] == 1)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with serving() as postgres:
        yield postgres


@pytest.fixture
def controls(tmp_path: Path, server: Postgres) -> Iterator[Controls]:
    made = Controls(tmp_path, server.make(tmp_path.name))
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()
    kill_all(made.run)


def test_standby_control_takes_over_from_a_killed_leader_and_adopts_units(controls: Controls) -> None:
    controls.pair()
    before, leader = controls.units(), controls.status(1)["leader"]
    assert leader["url"] == controls.url(0)
    assert httpx.get(f"{controls.url(1)}/livez").text == "ok\n"
    refused = httpx.post(f"{controls.url(1)}/v1/reload")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "not_leader"
    assert controls.url(0) in refused.json()["error"]["message"]
    assert controls.url(0) in controls.said(1)

    controls.processes[0].kill()
    wait_for(lambda: controls.ready(1))

    assert controls.units() == before
    assert controls.epochs() == ["2"]
    assert json.loads((controls.run / "snapshot.json").read_bytes())["epoch"] == 2
    assert httpx.post(f"{controls.url(1)}/v1/reload").status_code == 200
    controls.processes[1].send_signal(signal.SIGINT)
    assert controls.processes[1].wait(WAIT_S) == 0
    assert controls.units() == [], "nobody waited, so it stopped the cluster"
    assert "stopped; no process is left" in controls.said(1)


def test_resumed_leader_finds_itself_deposed_and_changes_nothing(controls: Controls) -> None:
    controls.pair()
    old = controls.processes[0]
    old.send_signal(signal.SIGSTOP)
    wait_for(lambda: controls.leads(1) and controls.pid(1, "chat-0") is not None)
    victim = controls.pid(1, "chat-0")
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: controls.ready(1) and victim not in controls.units())
    before = controls.units()

    old.send_signal(signal.SIGCONT)

    wait_for(lambda: "deposed: " in controls.said(0) and controls.waits(0))
    assert controls.status(0)["leader"]["url"] == controls.url(1)
    assert controls.units() == before
    assert controls.epochs() == ["2"]
    assert "Traceback" not in controls.said(0)
    wait_for(lambda: controls.status(1)["leader"]["waiting"] == 1)
    controls.processes[1].kill()
    wait_for(lambda: controls.ready(0))
    assert controls.units() == before
    assert controls.epochs() == ["3"]


def test_terminated_leader_hands_over_and_terminated_follower_exits(controls: Controls) -> None:
    controls.pair()
    before = controls.units()
    controls.processes[0].terminate()
    assert controls.processes[0].wait(WAIT_S) == 0
    assert "the cluster keeps running" in controls.said(0)
    wait_for(lambda: controls.ready(1))
    controls.start(0)
    wait_for(lambda: controls.waits(0))
    controls.processes[0].terminate()
    assert controls.processes[0].wait(WAIT_S) == 0
    assert controls.ready(1)
    assert controls.units() == before
