"""The memory that all models share: who sleeps so that another one can be loaded.

A model that sleeps has no process. It stays ready for clients: a request wakes it, and waits until it is loaded. When
another one is unloaded and leaves room, it is woken without a request: so many are kept warm as there is memory for.

Who needs memory that busy models hold waits in a line, and holds none meanwhile. What is being loaded counts as busy.
A model that is always busy has its turn: when it is over and others wait, it finishes what runs, and sleeps with its
requests waiting, in the line like all others.
"""

import asyncio
import os
from collections.abc import Awaitable, Iterable
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple, Protocol

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.memory import GIB, MemoryBudget

PROCESS_BYTES: Final = 64 * 2**20
"""What a process of a model is thought to need beside its files, before that can be measured."""
FILES_MAX: Final = 10_000
PASSES_MAX: Final = 8
"""Who waits for much is passed so often by those who need less, and then by nobody."""
PAUSE_S: Final = 0.1
"""Seconds without requests in which a model still counts as busy. A client that waits for each answer before it sends
the next request would otherwise lose its model, and have it loaded again, between any two of its requests."""
BACK_IN_S: Final = 1
"""When it makes sense to come back after waiting in vain: busy models may be idle then."""


class Withdrawn(Refused):
    """A model is not loaded because nobody waits for it any more."""

    def __init__(self) -> None:
        super().__init__(Kind.UNAVAILABLE, "the load was given up")


class MemoryUse(NamedTuple):
    """What the budget is used for, and how often models have been sent to sleep and woken."""

    budget_bytes: int
    used_bytes: int
    resident: int
    sleeping: int
    sleeps: int
    wakes: int


class Sleeper(Protocol):
    """A version of a model that can do without its processes for a while."""

    @property
    def key(self) -> str:
        """A name that no other one has."""

    @property
    def name(self) -> str:
        """The model's."""

    @property
    def pinned(self) -> bool:
        """It must not sleep."""

    @property
    def busy(self) -> bool:
        """It has requests."""

    def hold(self) -> None:
        """Begin nothing new: it is not busy any more once what runs has ended, whatever waits."""

    def go_on(self) -> None:
        """That is over, or never was."""

    @property
    def dormant(self) -> bool:
        """It sleeps, and may be woken."""

    @property
    def size_bytes(self) -> int:
        """What it takes, awake."""

    async def measured(self) -> int:
        """What it takes now."""

    def wake(self) -> None:
        """Load it again, some time soon."""

    def sleep(self) -> Awaitable[None]:
        """End its processes, which have ended when this has been awaited. From the call on, requests wait."""


class _Place:
    """In the line."""

    __slots__ = ("granted", "passed", "size_bytes", "sleeper", "waits")

    def __init__(self, sleeper: Sleeper, size_bytes: int, *, waits: bool) -> None:
        self.sleeper = sleeper
        self.size_bytes = size_bytes
        self.waits = waits
        """Else it is let in now or not at all."""
        self.passed = 0
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Room:
    """The account of memory, and its shell. `bytes_max` 0: there is no limit. `tasks` owns those who go to sleep.

    A busy model that holds memory gives way no sooner than `turn_s` after it was loaded. Until then, pauses of less
    than `pause_s` between its requests count as busy.
    """

    def __init__(self, bytes_max: int, turn_s: float, tasks: asyncio.TaskGroup, *, pause_s: float = PAUSE_S) -> None:
        self._budget = MemoryBudget(bytes_max)
        self._turn_s = turn_s
        self._pause_s = pause_s
        self._tasks = tasks
        self._line: dict[str, _Place] = {}
        self._loading: set[str] = set()
        self._awake: dict[str, Sleeper] = {}
        self._asleep: dict[str, Sleeper] = {}
        """Who was sent to sleep last is the last of them."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        """Of these the processes have not ended yet."""
        self._turn_ends_at: dict[str, float] = {}
        """Of who is awake and loaded, who was loaded first is the first."""
        self._held: set[str] = set()
        """These begin nothing new."""
        self._pauses: dict[str, asyncio.TimerHandle] = {}
        """Idle for less than `pause_s`, within their turn: these still count as busy."""
        self._alarm: asyncio.TimerHandle | None = None
        """When the next turn ends, if somebody waits for that."""
        self._stale: set[str] = set()
        """They may hold something else than when they were measured."""
        self._looks = False
        self._may_fill = False
        self._closing = False
        self._sleeps = 0
        self.wakes = 0
        """How many have been loaded again."""

    async def admit(self, sleeper: Sleeper, size_bytes: int, wait_s: float) -> None:
        """Make room for a version that is about to be loaded: it counts as busy until `loaded` or `remove`.

        Raises `Refused` (UNAVAILABLE) if there can be none, or none within the time; `Withdrawn` after `withdraw`, or
        if there is none now and it is not to wait.
        """
        place = self._line[sleeper.key] = _Place(sleeper, size_bytes, waits=wait_s > 0)
        self._look()
        if not place.waits and not place.granted.done():
            del self._line[sleeper.key]
            raise Withdrawn
        try:
            async with asyncio.timeout(wait_s):
                await place.granted
        except TimeoutError:
            text = f"model '{sleeper.name}' has waited {wait_s:.0f} s for {size_bytes / GIB:.2f} GiB of memory: the"
            raise Refused(Kind.UNAVAILABLE, f"{text} models that hold it are busy", BACK_IN_S) from None
        finally:
            del self._line[sleeper.key]
            self._look_soon()
        await self._all_ended()

    def withdraw(self, sleeper: Sleeper) -> None:
        """If it waits for memory, it does so no more."""
        place = self._line.get(sleeper.key)
        if place is not None and not place.granted.done():
            place.granted.set_exception(Withdrawn())

    async def settle(self, sleeper: Sleeper, size_bytes: int, *, anyway: bool) -> bool:
        """What is being loaded holds so much. False, unless it is to stay `anyway`: there is no room for so much now.

        Raises `Refused` (UNAVAILABLE) if there can be none.
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
        """It serves, and may be sent to sleep."""
        if sleeper.key in self._loading:
            self._turn_ends_at[sleeper.key] = monotonic() + self._turn_s
        self._loading.discard(sleeper.key)
        if self._budget.budget_bytes:
            self._stale.add(sleeper.key)
            self._leave(sleeper.key)

    def resize(self, sleeper: Sleeper, size_bytes: int) -> None:
        """It holds so much now; others sleep for it as far as they can."""
        self._budget.resize(sleeper.key, size_bytes)
        self._look_soon()

    def most_bytes(self, sleeper: Sleeper) -> int:
        """What there can be for it."""
        return self._budget.most_bytes(sleeper.key)

    def enter(self, sleeper: Sleeper) -> None:
        """It has requests: it cannot sleep."""
        if self._budget.budget_bytes:
            pause = self._pauses.pop(sleeper.key, None)
            if pause is None:
                self._budget.enter(sleeper.key)
            else:
                pause.cancel()

    def leave(self, sleeper: Sleeper) -> None:
        """It has none any more. Within its turn it counts as busy for `pause_s` all the same."""
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
        """It has no processes any more."""
        key = sleeper.key
        if key in self._budget:
            self._budget.remove(key)
            self._may_fill = True
            self._look_soon()
        self._loading.discard(key)
        self._forget(key)
        if self._budget.budget_bytes:
            self._stale.update(self._awake)  # what they have shared with it is theirs alone
        if not sleeper.dormant:
            self._asleep.pop(key, None)

    def use(self, sleeping: int) -> MemoryUse:
        """What the memory is used for."""
        budget = self._budget
        resident = len(self._awake.keys() - self._loading)
        return MemoryUse(budget.budget_bytes, budget.used_bytes, resident, sleeping, self._sleeps, self.wakes)

    async def keep(self, every_s: float) -> None:
        """Measure now and then what may have changed: models grow while they work. Until it is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self._measure()

    def close(self) -> None:
        """All are about to be unloaded: nobody sleeps or is woken for the budget's sake any more."""
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
        """Not at once: whoever says that something has changed is in the middle of it."""
        if not self._looks and self._budget.budget_bytes:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Let in who waits, then see to it that the budget is kept, and used."""
        self._looks = False
        waiting = self._let_in()
        if not self._closing:
            self._send_to_sleep(self._budget.trim())
            self._end_turns(waiting[0] if waiting else None)
        if self._may_fill and not self._line and not self._closing:
            self._may_fill = False
            self._fill()

    def _let_in(self) -> list[_Place]:
        """In the order in which they have come; who needs less may pass who has to wait, but not for ever.

        Who still waits, the first one first.
        """
        passed: list[_Place] = []
        for key, place in list(self._line.items()):
            if place.granted.done() or key in self._ending:
                continue
            sleeper = place.sleeper
            try:
                victims = self._budget.admit(key, place.size_bytes, pinned=sleeper.pinned)
            except Refused as refused:
                place.granted.set_exception(_of(sleeper, refused))
                continue
            if victims is None:
                passed.append(place)
                if place.passed >= PASSES_MAX:
                    break
                continue
            self._begin(sleeper)
            self._send_to_sleep(victims)
            place.granted.set_result(None)
            for each in passed:
                each.passed += 1
        return [place for place in passed if place.waits]

    def _end_turns(self, first: _Place | None) -> None:
        """Hold who has to fall idle for the first in the line, and nobody else. Look again when another turn ends."""
        now = monotonic()
        chosen: tuple[str, ...] = ()
        if first is not None:
            ripe = [key for key, at in self._turn_ends_at.items() if at <= now and not self._awake[key].pinned]
            chosen = self._budget.relief(first.sleeper.key, first.size_bytes, ripe)
        for key in self._held.difference(chosen):
            self._awake[key].go_on()
        for key in set(chosen) - self._held:
            self._awake[key].hold()
        self._held = set(chosen)
        at = min((at for at in self._turn_ends_at.values() if at > now), default=None)
        if first is not None and at is not None and not chosen and self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(at - now, self._rang)

    def _rang(self) -> None:
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
        """Wake who was sent to sleep last, as far as there is room for them beside those that are awake."""
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
