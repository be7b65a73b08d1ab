"""An interactive conversation with Ctrl-C, through a pseudo-terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli.fake_server import FakeServer

from forebay.cli.settings import INTERRUPTED

PROMPT = "you >"


class Terminal:
    """`forebay chat` in a terminal of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        environ = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forebay.cli.main", "chat", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={**environ, "TERM": "xterm", "COLUMNS": "100"},
            start_new_session=True,
        )
        os.close(theirs)
        self._seen = ""

    def wait_for(self, text: str, timeout_s: float = 30.0) -> str:
        """Read until `text` appears; returns what came before and forgets it."""
        deadline = time.monotonic() + timeout_s
        while text not in self._seen:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._ours], [], [], left)[0]:
                raise AssertionError(f"{text!r} did not appear; there is: {self._seen!r}")
            self._seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self._ours, 65_536).decode(errors="replace"))
        before, _, self._seen = self._seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._ours, os.fsencode(text))

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            os.close(self._ours)


@pytest.fixture
def terminal(server: FakeServer, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, "--url", server.url)
    yield terminal
    terminal.close()


def test_turns_share_a_conversation_until_ctrl_d(terminal: Terminal, server: FakeServer) -> None:
    server.documents.clear()
    terminal.wait_for(PROMPT)
    terminal.type("one\n")
    terminal.wait_for("is Paris.")
    terminal.wait_for("7 tokens")
    terminal.wait_for(PROMPT)
    terminal.type("two\n")
    terminal.wait_for("is Paris.")
    terminal.wait_for(PROMPT)
    terminal.type("/reset\n")
    terminal.wait_for("new conversation")
    terminal.wait_for(PROMPT)
    terminal.type("\udcff\n")
    terminal.wait_for("not UTF-8")
    terminal.wait_for(PROMPT)
    terminal.type("three\n")
    terminal.wait_for("is Paris.")
    terminal.wait_for(PROMPT)
    terminal.type("\x04")

    assert terminal.process.wait(20) == 0
    assert [[m["content"] for m in d["messages"] if m["role"] == "user"] for d in server.documents] == [
        ["one"],
        ["one", "two"],
        ["three"],
    ]


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_warns_once_and_then_exits(terminal: Terminal) -> None:
    terminal.wait_for(PROMPT)

    # A signal between the prompt and the first look at the keyboard waits for a key (CPython): press again.
    for _ in range(12):
        terminal.interrupt()
        with suppress(AssertionError):
            terminal.wait_for("Ctrl-C again", 1)
            break
    assert terminal.process.poll() is None
    terminal.wait_for(PROMPT)
    for _ in range(12):
        terminal.interrupt()
        with suppress(subprocess.TimeoutExpired):
            terminal.process.wait(2)
            break

    assert terminal.process.returncode == 130


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(server: FakeServer, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--url", server.url, "--model", "slow")
    try:
        terminal.wait_for(PROMPT)
        terminal.type("talk\n")
        terminal.wait_for("word 1 ")
        terminal.interrupt()
        terminal.wait_for("stopped")
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()


def test_ctrl_c_ends_a_single_answer_with_its_exit_code(server: FakeServer, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--url", server.url, "--model", "slow", "talk")
    try:
        terminal.wait_for("word 1 ")
        terminal.interrupt()
        terminal.wait_for("stopped")
        assert terminal.process.wait(20) == INTERRUPTED
    finally:
        terminal.close()
