"""Ends processes that a model has started and that have left its process group, and removes files of a killed server.

A process in a session of its own (`start_new_session=True`) cannot be found through its parent once the model's
process is gone. It keeps its initial environment, though, and a mark in that. If the server itself is killed, another
process does it, which the server has started for this: `python -m forebay.modelserver.strays MARK`. That one also
removes the folders of models that clients have sent, which may be as large as models are.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

VARIABLE: Final = "FOREBAY_MODEL_PROCESS"
ROUNDS_MAX: Final = 50
"""Scans of /proc: killed processes may have started more, and take a moment to disappear."""
ROUND_S: Final = 0.01
_OURS: Final = token_hex(16)
"""The beginning of all marks of this server."""
_FOLDER: Final = "forebay-model-{}-"


class Guard:
    """A process that waits for the end of this one, and then kills all processes with its marks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "forebay.modelserver.strays", _OURS),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # whoever kills the server kills its group
        )

    def close(self) -> None:
        """End it; nothing is left to do."""
        with self._process:
            self._process.kill()


def new_mark() -> str:
    """A new value of `VARIABLE` for one process."""
    return f"{_OURS}.{token_hex(8)}"


def new_folder() -> "tempfile.TemporaryDirectory[str]":
    """For files of a model; it is removed when the server ends, however that comes. Raises OSError."""
    return tempfile.TemporaryDirectory(prefix=_FOLDER.format(_OURS), ignore_cleanup_errors=True)


def end_strays(mark: str) -> int:
    """Kill all processes whose mark begins so, after the original one has ended; returns their number. Blocks."""
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
    """Kill a process if its environment has an entry that begins so."""
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
            return any(each.startswith(entry) for each in file.read().split(b"\0"))
    except OSError:  # it has ended, or belongs to another user
        return False


def main() -> None:
    """Wait until the server is gone, then kill what its models have started, and remove their folders."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # may be meant for all processes of a service
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_strays(sys.argv[1])
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER.format(sys.argv[1])}*"):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
