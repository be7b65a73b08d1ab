"""The memory budget that all models share: idle models sleep so that others can be loaded.

A sleeping model has no process. Clients still see it as ready: a request wakes it and waits for the load. When an
unload frees memory, sleeping models are woken without a request, as many as fit.

Models that need memory which busy models hold wait in a queue and hold none meanwhile. A model that is loading counts
as busy. A busy model keeps its memory for a minimum turn; after that, if others wait, it finishes its running batches
and goes to sleep, and its queued requests wait for it to be woken in the same queue.
"""

import asyncio
import os
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple, Protocol

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.memory import GIB, MemoryBudget

PROCESS_BYTES: Final = 64 * 2**20
"""Estimated size of a model process beyond its files, until it can be measured."""
FILES_MAX: Final = 10_000
PASSES_MAX: Final = 8
"""How often smaller models may overtake one that waits for memory; prevents starvation."""
PAUSE_S: Final = 0.1
"""Seconds without requests in which a model still counts as busy. A client that waits for each answer before it sends
the next request would otherwise lose its model, and have it loaded again, between any two of its requests."""
BACK_IN_S: Final = 1
"""Retry-after hint when the wait for memory timed out: busy models may be idle by then."""


class LoadCancelled(Refused):
    """A load was cancelled because no request waits for it any more."""

    def __init__(self) -> None:
        super().__init__(Kind.UNAVAILABLE, "the load was cancelled")


class MemoryUse(NamedTuple):
    """Use of the memory budget, and how often models were put to sleep and woken."""

    budget_bytes: int
    used_bytes: int
    resident: int
    sleeping: int
    sleeps: int
    wakes: int


class Sleeper(Protocol):
    """A model version that can be put to sleep, that is, run without its processes for a while."""

    @property
    def key(self) -> str:
        """Unique name of this load of the version."""

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def pinned(self) -> bool:
        """Whether it must not sleep."""

    @property
    def busy(self) -> bool:
        """Whether it has requests."""

    def hold(self) -> None:
        """Start no new batches, so that it stops being busy once the running ones end, whatever is queued."""

    def resume(self) -> None:
        """Undo `hold`; does nothing if it was not held."""

    @property
    def dormant(self) -> bool:
        """Whether it sleeps and may be woken."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes when awake."""

    async def measured(self) -> int:
        """Memory that it takes now."""

    def wake(self) -> None:
        """Load it again, asynchronously."""

    def sleep(self) -> Awaitable[None]:
        """Stop its processes; await the result for their end. From the call on, requests wait."""


class _Waiter:
    """An entry in the queue for memory."""

    __slots__ = ("granted", "passed", "size_bytes", "sleeper", "waits")

    def __init__(self, sleeper: Sleeper, size_bytes: int, *, waits: bool) -> None:
        self.sleeper = sleeper
        self.size_bytes = size_bytes
        self.waits = waits
        """False: admit it at once or not at all."""
        self.passed = 0
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class MemoryManager:
    """Memory budget and queue. `bytes_max` 0: no limit. `tasks` owns the models that go to sleep.

    A busy model keeps its memory for at least `turn_s` after it was loaded. Until then, pauses of less than `pause_s`
    between its requests count as busy.
    """

    def __init__(self, bytes_max: int, turn_s: float, tasks: asyncio.TaskGroup, *, pause_s: float = PAUSE_S) -> None:
        self._budget = MemoryBudget(bytes_max)
        self._turn_s = turn_s
        self._pause_s = pause_s
        self._tasks = tasks
        self._queue: dict[str, _Waiter] = {}
        self._loading: set[str] = set()
        self._awake: dict[str, Sleeper] = {}
        self._asleep: dict[str, Sleeper] = {}
        """In the order in which they were put to sleep."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        """Models whose processes are still stopping."""
        self._turn_ends_at: dict[str, float] = {}
        """Loaded models in load order, with the time at which each may be made to yield."""
        self._held: set[str] = set()
        """Models that `hold` keeps from starting new batches."""
        self._pauses: dict[str, asyncio.TimerHandle] = {}
        """Models in a pause that counts as busy, with the timer that ends it."""
        self._alarm: asyncio.TimerHandle | None = None
        """Fires at the end of the next turn, if a model waits for it."""
        self._stale: set[str] = set()
        """Models whose memory may have changed since it was measured."""
        self._looks = False
        self._may_fill = False
        self._closing = False
        self._sleeps = 0
        self.wakes = 0
        """How many sleeping models have been loaded again."""

    async def admit(self, sleeper: Sleeper, size_bytes: int, wait_s: float) -> None:
        """Make room for a version about to be loaded; it counts as busy until `loaded` or `remove`.

        Raises `Refused` (UNAVAILABLE) if it can never fit, or not within `wait_s`; `LoadCancelled` after `withdraw`,
        or with `wait_s` 0 if there is no room now.
        """
        waiter = self._queue[sleeper.key] = _Waiter(sleeper, size_bytes, waits=wait_s > 0)
        self._look()
        if not waiter.waits and not waiter.granted.done():
            del self._queue[sleeper.key]
            raise LoadCancelled
        try:
            async with asyncio.timeout(wait_s):
                await waiter.granted
        except TimeoutError:
            text = f"model '{sleeper.name}' has waited {wait_s:.0f} s for {size_bytes / GIB:.2f} GiB of memory: the"
            raise Refused(Kind.UNAVAILABLE, f"{text} models that hold it are busy", BACK_IN_S) from None
        finally:
            del self._queue[sleeper.key]
            self._look_soon()
        await self._all_ended()

    def withdraw(self, sleeper: Sleeper) -> None:
        """Cancel its wait for memory, if any."""
        waiter = self._queue.get(sleeper.key)
        if waiter is not None and not waiter.granted.done():
            waiter.granted.set_exception(LoadCancelled())

    async def settle(self, sleeper: Sleeper, size_bytes: int, *, anyway: bool) -> bool:
        """Account the measured size of a model that is loading. False, unless `anyway`: it does not fit now.

        Raises `Refused` (UNAVAILABLE) if it can never fit.
        """
        try:
            if not self._budget.has_room(sleeper.key, size_bytes) and not anyway:
                return False
        except Refused as refused:
            raise _of(sleeper, refused) from None
        self._budget.resize(sleeper.key, size_bytes)
        self._send_to_sleep(self._budget.trim(sleeper.key))
        self._look_soon()
        await self._all_ended()
        return True

    def loaded(self, sleeper: Sleeper) -> None:
        """The load has finished: the model may be put to sleep from now on."""
        if sleeper.key in self._loading:
            self._turn_ends_at[sleeper.key] = monotonic() + self._turn_s
        self._loading.discard(sleeper.key)
        if self._budget.budget_bytes:
            self._stale.add(sleeper.key)
            self._leave(sleeper.key)

    def resize(self, sleeper: Sleeper, size_bytes: int) -> None:
        """Account a changed size; others are put to sleep as far as needed and possible."""
        self._budget.resize(sleeper.key, size_bytes)
        self._look_soon()

    def most_bytes(self, sleeper: Sleeper) -> int:
        """The most memory that this model could get."""
        return self._budget.most_bytes(sleeper.key)

    def enter(self, sleeper: Sleeper) -> None:
        """It has requests now: it must not be put to sleep."""
        if self._budget.budget_bytes:
            pause = self._pauses.pop(sleeper.key, None)
            if pause is None:
                self._budget.enter(sleeper.key)
            else:
                pause.cancel()

    def leave(self, sleeper: Sleeper) -> None:
        """It has no requests any more. Within its turn it still counts as busy for `pause_s`."""
        key = sleeper.key
        if not self._budget.budget_bytes:
            return
        self._stale.add(key)
        pause_s = min(self._pause_s, self._turn_ends_at.get(key, 0.0) - monotonic())
        if pause_s > 0.0 and not self._closing:
            self._pauses[key] = asyncio.get_running_loop().call_later(pause_s, self._end_pause, key)
        else:
            self._leave(key)

    def remove(self, sleeper: Sleeper) -> None:
        """Its processes have ended: release its memory."""
        key = sleeper.key
        if key in self._budget:
            self._budget.remove(key)
            self._may_fill = True
            self._look_soon()
        self._loading.discard(key)
        self._forget(key)
        if self._budget.budget_bytes:
            self._stale.update(self._awake)  # memory that they shared with it now counts for them alone
        if not sleeper.dormant:
            self._asleep.pop(key, None)

    def use(self, sleeping: int) -> MemoryUse:
        """Current use of the budget."""
        budget = self._budget
        resident = len(self._awake.keys() - self._loading)
        return MemoryUse(budget.budget_bytes, budget.used_bytes, resident, sleeping, self._sleeps, self.wakes)

    async def keep(self, every_s: float) -> None:
        """Measure models that were used since, every `every_s`: they grow as they work. Runs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self._measure()

    def close(self) -> None:
        """Stop putting models to sleep and waking them: all are about to be unloaded."""
        self._closing = True
        if self._alarm is not None:
            self._alarm.cancel()
        for key in [*self._pauses]:
            self._end_pause(key)

    def _end_pause(self, key: str) -> None:
        self._pauses.pop(key).cancel()
        self._leave(key)

    def _leave(self, key: str) -> None:
        self._budget.leave(key)
        self._look_soon()

    async def _measure(self) -> None:
        stale, self._stale = self._stale, set()
        for key in stale & self._awake.keys():
            sleeper = self._awake.get(key)
            if sleeper is not None and key not in self._loading:
                size_bytes = await sleeper.measured()
                if key not in self._loading:
                    self._budget.resize(key, size_bytes)
        self._look()

    def _look_soon(self) -> None:
        """Deferred, because the caller is in the middle of a change."""
        if not self._looks and self._budget.budget_bytes:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Admit waiting models, then enforce the budget and fill what is free."""
        self._looks = False
        waiting = self._admit_waiting()
        if not self._closing:
            self._send_to_sleep(self._budget.trim())
            self._end_turns(waiting[0] if waiting else None)
        if self._may_fill and not self._queue and not self._closing:
            self._may_fill = False
            self._fill()

    def _admit_waiting(self) -> list[_Waiter]:
        """Admit in order of arrival; smaller models may overtake, up to PASSES_MAX times.

        Returns those that still wait, in order.
        """
        passed: list[_Waiter] = []
        for key, waiter in list(self._queue.items()):
            if waiter.granted.done() or key in self._ending:
                continue
            sleeper = waiter.sleeper
            try:
                victims = self._budget.admit(key, waiter.size_bytes, pinned=sleeper.pinned)
            except Refused as refused:
                waiter.granted.set_exception(_of(sleeper, refused))
                continue
            if victims is None:
                passed.append(waiter)
                if waiter.passed >= PASSES_MAX:
                    break
                continue
            self._begin(sleeper)
            self._send_to_sleep(victims)
            waiter.granted.set_result(None)
            for each in passed:
                each.passed += 1
        return [waiter for waiter in passed if waiter.waits]

    def _end_turns(self, first: _Waiter | None) -> None:
        """Hold the models that must become idle for the first in the queue, and release all others.

        Sets the alarm for the end of the next turn if none can be held yet.
        """
        now = monotonic()
        chosen: tuple[str, ...] = ()
        if first is not None:
            ripe = [key for key, at in self._turn_ends_at.items() if at <= now and not self._awake[key].pinned]
            chosen = self._budget.relief(first.sleeper.key, first.size_bytes, ripe)
        for key in self._held.difference(chosen):
            self._awake[key].resume()
        for key in set(chosen) - self._held:
            self._awake[key].hold()
        self._held = set(chosen)
        at = min((at for at in self._turn_ends_at.values() if at > now), default=None)
        if first is not None and at is not None and not chosen and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(at - now, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._look()

    def _forget(self, key: str) -> None:
        """It is not awake any more."""
        pause = self._pauses.pop(key, None)
        if pause is not None:
            pause.cancel()
        self._stale.discard(key)
        self._turn_ends_at.pop(key, None)
        self._held.discard(key)
        self._awake.pop(key, None)

    def _begin(self, sleeper: Sleeper) -> None:
        key = sleeper.key
        self._budget.enter(key)
        if sleeper.busy:
            self._budget.enter(key)
        self._loading.add(key)
        self._awake[key] = sleeper
        self._asleep.pop(key, None)

    def _fill(self) -> None:
        """Wake sleeping models, last put to sleep first, as far as they fit into free memory."""
        free_bytes = self._budget.budget_bytes - self._budget.used_bytes
        for key, sleeper in reversed(self._asleep.copy().items()):
            if not sleeper.dormant:
                del self._asleep[key]
            elif sleeper.size_bytes <= free_bytes:
                free_bytes -= sleeper.size_bytes
                sleeper.wake()

    def _send_to_sleep(self, keys: Iterable[str]) -> None:
        for key in keys:
            sleeper = self._awake[key]
            self._forget(key)
            ending = sleeper.sleep()
            if sleeper.dormant:
                self._asleep[key] = sleeper
                self._sleeps += 1
            self._ending[key] = self._tasks.create_task(self._ended(key, ending))

    async def _all_ended(self) -> None:
        if self._ending:
            await asyncio.wait(set(self._ending.values()))

    async def _ended(self, key: str, ending: Awaitable[None]) -> None:
        await ending
        del self._ending[key]
        self._look_soon()


def _of(sleeper: Sleeper, refused: Refused) -> Refused:
    return Refused(refused.kind, f"model '{sleeper.name}' {refused.text}")


def guessed_bytes(folder: Path, beginning: str = "") -> int:
    """Estimated size of a version that was never loaded: its files, whose names begin like this, plus a process."""
    total = PROCESS_BYTES
    looked_at = 0
    for at, _, files in os.walk(folder):
        for name in files:
            looked_at += 1
            if looked_at > FILES_MAX:
                return total
            if name.startswith(beginning):
                with suppress(OSError):  # someone writes to the repository now
                    total += (Path(at) / name).stat().st_size
    return total


def used_bytes(pids: Iterable[int]) -> int:
    """Memory of processes in bytes, shared pages split evenly (PSS). Processes that ended count 0."""
    return sum(map(_proportional, pids))


def _proportional(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "Pss:"), 0)
