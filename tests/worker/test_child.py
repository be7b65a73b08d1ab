"""The child's loop around an engine, over a real socket pair."""

import fcntl
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from forebay.core.errors import Code, Refusal
from forebay.engines.protocol import (
    Delta,
    EngineInfo,
    EngineLoad,
    Failed,
    Generate,
    Sampling,
    Step,
    Work,
)
from forebay.wire.frames import FrameReader
from forebay.worker.channel import (
    Cancel,
    Configure,
    Ping,
    Pong,
    Progress,
    Ready,
    Stop,
    ToChild,
    ToWorker,
    decode_to_worker,
    encode,
)
from forebay.worker.child import Pipe, serve


class Scripted:
    """An engine that says one word a step for each sequence it holds."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.step_fails = False

    def load(self) -> EngineInfo:
        raise NotImplementedError

    def add(self, work: Work, now: float) -> None:
        if work.id.startswith("bad"):
            raise Refusal(Code.INVALID_REQUEST, "no good", "prompt")
        self.held.append(work.id)

    def cancel(self, id: str) -> None:
        self.held = [held for held in self.held if held != id]

    def step(self, now: float) -> Step:
        if self.step_fails:
            raise RuntimeError("poisoned")
        events = tuple(Delta(id, " word", 1) for id in self.held)
        return Step(events, EngineLoad(running=len(self.held)), 0.001 if self.held else None)

    def close(self) -> None: ...


class Parent:
    """The worker's end: sends messages, gathers what comes back."""

    def __init__(self, engine: Scripted) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(10)
        self._theirs = theirs
        self._reader = FrameReader()
        self._engine = engine
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._serve)
        self.seen: list[ToWorker] = []

    def _serve(self) -> None:
        try:
            serve(Pipe(self._theirs), self._engine)
        except (RuntimeError, EOFError, OSError) as error:
            self.error = error
        finally:
            self._theirs.close()

    def __enter__(self) -> "Parent":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ours.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def send(self, *messages: ToChild) -> None:
        self._ours.sendall(encode(messages))

    def wait(self, what: Callable[[ToWorker], bool]) -> ToWorker:
        """The next message of this kind."""
        while True:
            while self.seen:
                message = self.seen.pop(0)
                if what(message):
                    return message
            data = self._ours.recv(65_536)
            assert data, "the child is gone"
            for payload in self._reader.feed(data):
                self.seen += decode_to_worker(payload)

    def ended(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


def running(count: int) -> Callable[[ToWorker], bool]:
    return lambda message: isinstance(message, Progress) and message.load.running == count


def generate(id: str) -> Generate:
    return Generate(id, "x", Sampling())


def test_refused_work_fails_alone_and_the_rest_goes_on() -> None:
    with Parent(Scripted()) as parent:
        parent.send(generate("bad-1"), generate("a"))
        message = parent.wait(running(1))
        assert isinstance(message, Progress)
        assert message.events == (
            Failed("bad-1", Code.INVALID_REQUEST, "no good", "prompt"),
            Delta("a", " word", 1),
        )


def test_a_cancelled_sequence_is_gone_and_the_load_says_so() -> None:
    with Parent(Scripted()) as parent:
        parent.send(generate("a"), generate("b"))
        parent.wait(running(2))
        parent.send(Cancel("a"), Cancel("unknown"))
        message = parent.wait(running(1))
        assert isinstance(message, Progress)
        assert [event.id for event in message.events] == ["b"]
        parent.send(Cancel("b"))
        parent.wait(running(0))


def test_pings_are_answered_idle_or_busy() -> None:
    with Parent(Scripted()) as parent:
        parent.send(Ping())
        assert parent.wait(lambda message: isinstance(message, Pong)) == Pong()
        parent.send(generate("a"))
        parent.wait(running(1))
        parent.send(Ping())
        assert parent.wait(lambda message: isinstance(message, Pong)) == Pong()


def test_the_loop_ends_when_told_and_when_the_worker_is_gone() -> None:
    with Parent(Scripted()) as parent:
        parent.send(Stop())
        parent.ended()
        assert parent.error is None
    with Parent(Scripted()) as parent:
        pass
    assert isinstance(parent.error, EOFError)


def test_an_exception_in_a_step_ends_the_loop() -> None:
    engine = Scripted()
    engine.step_fails = True
    with Parent(engine) as parent:
        parent.send(Ping())
        parent.ended()
        with pytest.raises(RuntimeError, match="poisoned"):
            raise parent.error or AssertionError


@pytest.mark.slow
def test_the_child_of_a_worker_with_many_open_files_gets_its_messages() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    ours, theirs = socket.socketpair()
    high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 1024)  # more than select() takes
    theirs.close()
    command = [sys.executable, "-m", "forebay.worker.child", str(high), str(os.getpid())]
    with ours, subprocess.Popen(command, pass_fds=(high,)) as child:
        os.close(high)
        ours.settimeout(60)
        ours.sendall(encode([Configure("synthetic", "", {})]))
        (payload,) = FrameReader().feed(ours.recv(65_536))
        assert isinstance(decode_to_worker(payload)[0], Ready)
        ours.sendall(encode([Stop()]))
        assert child.wait(60) == 0
