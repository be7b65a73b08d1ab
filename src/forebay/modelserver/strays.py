"""Processes that a model has started and that its process group no longer has: they end with the model, too.

One in a session of its own (`start_new_session=True`) is nobody's child any more once the model's process is gone.
What it keeps is the environment that it was started with, and in that a mark.
"""

import os
import signal
import time
from contextlib import suppress
from secrets import token_hex
from typing import Final

VARIABLE: Final = "FOREBAY_MODEL_PROCESS"
ROUNDS_MAX: Final = 50
"""Of looking: what is killed may have started more, and takes a moment to be gone."""
ROUND_S: Final = 0.01


def new_mark() -> str:
    """What to give one process as `VARIABLE`."""
    return token_hex(16)


def end_strays(mark: str) -> int:
    """Kill all that has this mark, once the process that it was given has ended; returns how many. Blocks."""
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
            if _has(pid, entry):  # the number has not become another process's meanwhile
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
    return True


def _has(pid: int, entry: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return entry in file.read().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
