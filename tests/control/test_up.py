"""`forebay up` as a process, over stand-ins: the lock, ports, signals, and what is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.control.units import kill_all

from forebay.control.journal import Journal
from forebay.control.ports import Taken, bind, holders
from forebay.providers.processes import session_leaders

REPO = Path(__file__).parents[2]
WAIT_S = 30.0


class Ups:
    """Starts `up` processes over one home, and ends whatever is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.run = self.home / "run" / "t"
        self.processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            self.ports = one.getsockname()[1], two.getsockname()[1]
        self.configure()

    def configure(self, replicas: int = 2, **settings: Any) -> None:
        model = {"name": "chat", "task": "chat", "source": "none", "engine": "synthetic", "replicas": replicas}
        gateway, admin = ({"port": port} for port in self.ports)
        document = {"name": "t", "gateway": gateway, "admin": admin, "models": [{**model, **settings}]}
        (self.folder / "f.yaml").write_text(json.dumps(document))

    def start(self, terminal: int | None = None) -> subprocess.Popen[bytes]:
        """With a terminal, it is the one that controls the process."""
        command = [sys.executable, "-m", "tests.control.stand_in_up", str(self.folder / "f.yaml"), str(self.home)]
        with self.output.open("wb") as sink:
            process = subprocess.Popen(
                command if terminal is None else ["setsid", "--ctty", *command],
                cwd=REPO,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    @property
    def output(self) -> Path:
        return self.folder / f"out{len(self.processes)}"

    def said(self, number: int = -1) -> str:
        outputs = sorted(self.folder.glob("out*"))
        return outputs[number].read_text()

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"http://127.0.0.1:{self.ports[1]}/v1/status", timeout=5).json()
        return answer

    def pids(self) -> dict[str, int]:
        status = self.status()
        return {u["id"]: u["pid"] for u in [*status["gateways"], *status["models"][0]["replicas"]]}

    def units(self) -> list[int]:
        return [pid for pid, _ in session_leaders(self.run / "units")]


def wait_for(holds: Callable[[], object]) -> None:
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, OSError):
            if holds():
                return
        pause.wait(0.05)
    raise AssertionError("never came true")


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[Ups]:
    made = Ups(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    kill_all(made.run)


@pytest.mark.slow
def test_up_reports_ready_once_and_ctrl_c_leaves_no_processes(ups: Ups) -> None:
    process = ups.start()
    wait_for(lambda: "ready after" in ups.said())
    assert len(ups.units()) == 3
    process.send_signal(signal.SIGINT)

    assert process.wait(WAIT_S) == 0
    assert ups.units() == []
    said = ups.said()
    assert f"http://127.0.0.1:{ups.ports[0]}/v1" in said
    assert f"curl http://127.0.0.1:{ups.ports[0]}/v1/chat/completions" in said
    assert "Traceback" not in said
    assert "stopped; no process is left" in said


@pytest.mark.slow
def test_units_survive_a_killed_up_and_are_adopted_by_the_next(ups: Ups) -> None:
    first = ups.start()
    wait_for(lambda: "ready after" in ups.said())
    before = ups.pids()
    first.kill()
    first.wait()
    assert sorted(ups.units()) == sorted(before.values())
    os.kill(before["chat-1"], signal.SIGKILL)

    second = ups.start()
    wait_for(lambda: "ready after" in ups.said())

    after = ups.pids()
    assert {k: v for k, v in after.items() if k != "chat-1"} == {k: v for k, v in before.items() if k != "chat-1"}
    assert after["chat-1"] != before["chat-1"]
    assert "adopted 2 running processes" in ups.said()
    second.terminate()
    assert second.wait(WAIT_S) == 0
    assert ups.units() == []


@pytest.mark.slow
def test_next_up_removes_units_not_in_the_file(ups: Ups) -> None:
    first = ups.start()
    wait_for(lambda: "ready after" in ups.said())
    first.kill()
    first.wait()
    ups.configure(replicas=1)

    ups.start()
    wait_for(lambda: "ready after" in ups.said() and len(ups.units()) == 2)

    assert sorted(ups.pids()) == ["chat-0", "gateway-0"]


@pytest.mark.slow
def test_second_up_is_rejected_and_changes_nothing(ups: Ups) -> None:
    first = ups.start()
    wait_for(lambda: "ready after" in ups.said())
    before = ups.pids()

    second = ups.start()

    assert second.wait(WAIT_S) == 1
    assert f"is run by process {first.pid} since 20" in ups.said()
    assert ups.pids() == before


@pytest.mark.slow
def test_second_ctrl_c_kills_immediately(ups: Ups) -> None:
    ups.configure(drain_grace_s=3600)
    process = ups.start()
    wait_for(lambda: "ready after" in ups.said())
    os.kill(ups.pids()["chat-0"], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "chat-1: stopped" in ups.said())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)

    assert process.wait(WAIT_S) == 0
    assert ups.units() == []


@pytest.mark.slow
def test_sighup_applies_a_changed_file_and_rejects_an_invalid_one(ups: Ups) -> None:
    process = ups.start()
    wait_for(lambda: "ready after" in ups.said())
    before = ups.pids()
    good = (ups.folder / "f.yaml").read_text()

    (ups.folder / "f.yaml").write_text(good.replace('"replicas": 2', '"replicas": 0') + "x: [")
    process.send_signal(signal.SIGHUP)
    wait_for(lambda: "nothing was changed" in ups.said())
    (ups.folder / "f.yaml").write_text(good.replace('"name": "t"', '"name": "u"'))
    process.send_signal(signal.SIGHUP)
    wait_for(lambda: 'name: "t" → "u" needs a restart of forebay up' in ups.said())
    assert ups.pids() == before
    ups.configure(replicas=3)
    process.send_signal(signal.SIGHUP)
    wait_for(lambda: len(ups.pids()) == 4 and all(ups.pids().values()))

    assert ups.pids().items() > before.items()
    assert "models.chat.replicas: 2 → 3" in ups.said()
    process.terminate()
    assert process.wait(WAIT_S) == 0
    assert ups.units() == []


@pytest.mark.slow
def test_closed_terminal_stops_the_cluster(ups: Ups) -> None:
    main, terminal = os.openpty()
    process = ups.start(terminal)
    os.close(terminal)
    wait_for(lambda: len(ups.units()) == 3 and ups.status()["ready"])

    os.close(main)

    assert process.wait(WAIT_S) == 0
    assert ups.units() == []


@pytest.mark.slow
def test_a_port_in_use_is_reported_with_its_process_and_setting(ups: Ups) -> None:
    listeners = [socket.create_server(("127.0.0.1", port)) for port in ups.ports]
    try:
        assert ups.start().wait(WAIT_S) == 1
    finally:
        for each in listeners:
            each.close()

    said = ups.said()
    for port, setting in zip(ups.ports, ("gateway.port", "admin.port"), strict=True):
        assert f"port {port} is in use by process {os.getpid()}" in said
        assert setting in said
    assert not (ups.run / "units").exists()


def test_full_disk_costs_only_lines_of_the_journal() -> None:
    journal = Journal(Path("/dev/full"), lambda event: None)
    journal.note("trouble", "the disk is full")
    journal.close()

    assert [event.why for event in journal.events] == ["the disk is full"]


def test_bind_returns_a_socket_or_the_reason() -> None:
    free = bind("127.0.0.1", 0)
    assert isinstance(free, socket.socket)
    with free:
        free.listen()
        port = free.getsockname()[1]
        assert holders(port) == (os.getpid(),)
        taken = bind("127.0.0.1", port)
        assert isinstance(taken, Taken)
        assert taken.pids == (os.getpid(),)
        assert f"process {os.getpid()}: " in taken.why
    nowhere = bind("192.0.2.1", 0)
    assert isinstance(nowhere, Taken)
    assert "not an address of this machine" in nowhere.why
    unknown = bind("no.such.host.invalid", 1)
    assert isinstance(unknown, Taken)
    assert "unknown" in unknown.why
