"""How long this thread has waited for a core.

A thread with a core to itself reads what arrives at once. On a core that it shares it first has to wait for its turn,
while a batch runs there (`process.placement.take_turns`), and what it then reads may have arrived long before.
"""

import os
import threading
from contextlib import suppress
from typing import Final

FILE: Final = "/proc/thread-self/schedstat"
"""Nanoseconds on a core, nanoseconds ready to run without one, and turns (Linux, Documentation/scheduler)."""
FILE_BYTES: Final = 80

_here = threading.local()


class _Waits:
    """The waits of the thread that makes it."""

    def __init__(self) -> None:
        self._fd = -1
        self._seen_ns = 0
        with suppress(OSError):  # another system, or a sandbox without /proc
            self._fd = os.open(FILE, os.O_RDONLY | os.O_CLOEXEC)
        self.more_ns()

    def more_ns(self) -> int:
        """How much there was since the last call."""
        if self._fd < 0:
            return 0
        before, self._seen_ns = self._seen_ns, int(os.pread(self._fd, FILE_BYTES, 0).split()[1])
        return self._seen_ns - before

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def waited_s() -> float:
    """Seconds since the last call in which this thread was ready to run and had no core; 0.0 if nothing tells."""
    waits: _Waits | None = getattr(_here, "waits", None)
    if waits is None:
        waits = _here.waits = _Waits()
        return 0.0
    return waits.more_ns() / 1e9
