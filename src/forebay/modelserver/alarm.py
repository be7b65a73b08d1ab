"""An event-loop timer with microsecond precision.

uvloop's timers count whole milliseconds: a shorter wait ends at once, and a caller that then finds itself too early
and waits again keeps a CPU busy. This one uses the kernel's timerfd.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import inf
from time import CLOCK_MONOTONIC, monotonic
from typing import Final

ABSOLUTE: Final = 1
"""`TFD_TIMER_ABSTIME`."""
FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
COUNT_BYTES: Final = 8
_Spec = ctypes.c_long * 4


class Alarm:
    """Calls `ring` on the loop at a given time. Spurious calls are possible: check what is due."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._at = inf
        self._closed = False

    def set(self, at: float) -> None:
        """Ring at that time of CLOCK_MONOTONIC, in seconds, or earlier: the earliest time set wins."""
        if at >= self._at or self._closed:
            return
        if self._fd < 0:
            try:
                self._fd = _checked(_libc().timerfd_create(CLOCK_MONOTONIC, FLAGS))
            except OSError:  # out of descriptors: in whole milliseconds then
                self._loop.call_later(max(0.0, at - monotonic()) + 1e-3, self._rang_late)
                return
            self._loop.add_reader(self._fd, self._rang)
        self._at = at
        seconds = int(at)
        spec = _Spec(0, 0, seconds, max(1, int((at - seconds) * 1e9)))  # all zeros would disarm it
        _checked(_libc().timerfd_settime(self._fd, ABSOLUTE, spec, None))

    def close(self) -> None:
        """Never ring again."""
        self._closed = True
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _rang_late(self) -> None:
        if not self._closed:
            self._ring()

    def _rang(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._fd, COUNT_BYTES)
        self._at = inf
        self._ring()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
