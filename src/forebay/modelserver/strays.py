"""Ends processes that a model has started and that have left its process group.

A process in a session of its own (`start_new_session=True`) cannot be found through its parent once the model's
process is gone. It keeps its initial environment, though, and a mark in that.
"""

import os
import signal
import time
from contextlib import suppress
from secrets import token_hex
from typing import Final

VARIABLE: Final = "FOREBAY_MODEL_PROCESS"
ROUNDS_MAX: Final = 50
"""Scans of /proc: killed processes may have started more, and take a moment to disappear."""
ROUND_S: Final = 0.01


def new_mark() -> str:
    """A new value of `VARIABLE` for one process."""
    return token_hex(16)


def end_strays(mark: str) -> int:
    """Kill all processes with this mark, after the original one has ended; returns their number. Blocks."""
    entry = f"{VARIABLE}={mark}".encode()
    ended: set[int] = set()
    for _ in range(ROUNDS_MAX):
        found = {int(name) for name in os.listdir("/proc") if name.isdigit() and _kill(int(name), entry)}
        if not found:
            break
        ended |= found
        time.sleep(ROUND_S)
    return len(ended)


def _kill(pid: int, entry: bytes) -> bool:
    """Kill a process if its environment has this entry."""
    if not _has(pid, entry):
        return False
    with suppress(OSError):  # it has ended
        fd = os.pidfd_open(pid)
        try:
            if _has(pid, entry):  # the pid has not been reused meanwhile
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
    return True


def _has(pid: int, entry: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return entry in file.read().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False
