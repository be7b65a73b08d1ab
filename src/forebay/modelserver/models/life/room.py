"""The memory that all models share: who sleeps so that another one can be loaded.

A model that sleeps has no process. It stays ready for clients: a request wakes it, and waits until it is loaded. When
another one is unloaded and leaves room, it is woken without a request: so many are kept warm as there is memory for.
"""

import asyncio
import os
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Final, Protocol

from forebay.core.serving.memory import MemoryBudget

PROCESS_BYTES: Final = 64 * 2**20
"""What a process of a model is thought to need beside its files, before that can be measured."""
FILES_MAX: Final = 10_000


class Sleeper(Protocol):
    """A version of a model that can do without its processes for a while."""

    @property
    def key(self) -> str:
        """A name that no other one has."""

    @property
    def pinned(self) -> bool:
        """It must not sleep."""

    @property
    def dormant(self) -> bool:
        """It sleeps, and may be woken."""

    @property
    def size_bytes(self) -> int:
        """What it takes, awake."""

    def wake(self) -> None:
        """Load it again, some time soon."""

    def sleep(self) -> Awaitable[None]:
        """End its processes, which have ended when this has been awaited. From the call on, requests wait."""


class Room:
    """The account of memory, and its shell. `bytes_max` 0: there is no limit."""

    def __init__(self, bytes_max: int) -> None:
        self._budget = MemoryBudget(bytes_max)
        self._lock = asyncio.Lock()
        self._awake: dict[str, Sleeper] = {}
        self._asleep: dict[str, Sleeper] = {}
        """Who was sent to sleep last is the last of them. Some may have been unloaded meanwhile."""

    async def admit(self, sleeper: Sleeper, size_bytes: int) -> None:
        """Make room for a version that is about to be loaded, or turns out to need so much now that it is.

        Raises `Refused` (UNAVAILABLE) with the arithmetic if there is none.
        """
        async with self._lock:
            victims = self._budget.admit(sleeper.key, size_bytes, pinned=sleeper.pinned)
            self._awake[sleeper.key] = sleeper
            self._asleep.pop(sleeper.key, None)
            await self._send_to_sleep(victims)

    async def resize(self, sleeper: Sleeper, size_bytes: int) -> None:
        """A version that serves needs so much now; others sleep for it as far as they can."""
        async with self._lock:
            if sleeper.key in self._budget:
                await self._send_to_sleep(self._budget.resize(sleeper.key, size_bytes))

    def enter(self, sleeper: Sleeper) -> None:
        """It has requests: it cannot sleep."""
        self._budget.enter(sleeper.key)

    def leave(self, sleeper: Sleeper) -> None:
        """It has none any more."""
        self._budget.leave(sleeper.key)

    def remove(self, sleeper: Sleeper) -> None:
        """It has no processes any more."""
        leaves_room = sleeper.key in self._budget
        self._budget.remove(sleeper.key)
        self._awake.pop(sleeper.key, None)
        if leaves_room:
            self._fill()

    def _fill(self) -> None:
        """Wake who was sent to sleep last, as far as there is room for them beside those that are awake."""
        free_bytes = self._budget.budget_bytes - self._budget.used_bytes
        for key, sleeper in reversed(self._asleep.copy().items()):
            if not sleeper.dormant:
                del self._asleep[key]
            elif sleeper.size_bytes <= free_bytes:
                free_bytes -= sleeper.size_bytes
                del self._asleep[key]
                sleeper.wake()

    async def _send_to_sleep(self, keys: Iterable[str]) -> None:
        sleepers = {key: self._awake.pop(key) for key in keys}
        await asyncio.gather(*[sleeper.sleep() for sleeper in sleepers.values()])
        self._asleep.update(sleepers)


def guessed_bytes(folder: Path) -> int:
    """What a version will need that has never been loaded: its files, and a process around them."""
    total = PROCESS_BYTES
    looked_at = 0
    for at, _, files in os.walk(folder):
        for name in files:
            looked_at += 1
            if looked_at > FILES_MAX:
                return total
            total += (Path(at) / name).stat().st_size
    return total


def used_bytes(pids: Iterable[int]) -> int:
    """What processes have of memory: shared pages in equal parts (PSS). 0 for those that are gone."""
    return sum(map(_proportional, pids))


def _proportional(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "Pss:"), 0)
