"""How long a thread has waited for its core, with another process on the same one."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from time import monotonic

import pytest

from forebay.modelserver import turns
from forebay.modelserver.turns import waited_s

LIMIT_S = 30.0
BUSY = "while True: pass"


def in_thread(work: Callable[[], None]) -> None:
    """A thread of its own has not waited yet, and may be tied to a core."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def test_waits_beside_a_busy_process_are_counted_once() -> None:
    def share() -> None:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        assert waited_s() == 0.0  # nothing before the first call counts
        began = monotonic()
        with subprocess.Popen([sys.executable, "-c", BUSY]) as other:
            try:
                total_s = 0.0
                while total_s < 0.005 and monotonic() - began < LIMIT_S:
                    more_s = waited_s()
                    assert more_s >= 0.0
                    total_s += more_s
            finally:
                other.kill()
        assert 0.005 <= total_s <= monotonic() - began

    in_thread(share)


def test_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "FILE", "/proc/no-such-file")

    def ask() -> None:
        assert [waited_s(), waited_s()] == [0.0, 0.0]

    in_thread(ask)
