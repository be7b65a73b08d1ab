"""The machine of a simulated cluster: its processes, which end or are killed and leave their files behind.

Real processes cannot run on virtual time. Here a process is a task on its own network node; modules that ask the
operating system for process ids get simulated ones.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol

import msgspec

from forebay.core.model import Endpoint
from forebay.core.reconcile import ObservedUnit, Slot, UnitKey
from forebay.gateway import pages, serve
from forebay.net import ports
from forebay.providers.protocol import ProviderError
from forebay.sim.full.event_log import EventLog
from forebay.sim.network.network import Network
from forebay.wire.documents import UNREADABLE

FIRST_PID: Final = 1000
ENDED: Final = "ended with exit code 0"
KILLED: Final = "was killed by signal 9 (SIGKILL)"
ASKS_OS: Final[tuple[ModuleType, ...]] = (pages, serve, ports)
"""Modules whose `os` is replaced by that of the simulated machine."""


class ExitError(Exception):
    """A process ends with exit code 1; the text is its last output."""


class Process:
    """One unit. `signal` is called when it is asked to stop."""

    def __init__(self, slot: Slot, generation: int, pid: int, endpoint_path: Path) -> None:
        self.slot = slot
        self.generation = generation
        self.pid = pid
        self.node = f"{slot.id}.{generation}"
        self.endpoint_path = endpoint_path
        self.spec = replace(slot.spec, generation=generation, endpoint_path=str(endpoint_path))
        self.alive = True
        self.asked = False
        self.ended = ""
        self.last_words = ""
        self.signal: Callable[[], None] = lambda: None
        self.task: asyncio.Task[None] | None = None

    @property
    def key(self) -> UnitKey:
        """Slot and generation."""
        return self.slot.id, self.generation


RUNNING: ContextVar[Process | None] = ContextVar("process", default=None)
"""The current process."""


class Machine:
    """All processes. `main` is their code; it may raise `ExitError`."""

    def __init__(
        self,
        network: Network,
        group: asyncio.TaskGroup,
        folder: Path,
        event_log: EventLog,
        main: Callable[[Process], Awaitable[None]],
    ) -> None:
        self.processes: dict[UnitKey, Process] = {}
        self.unreachable = ""
        """Why running processes cannot be observed; empty: they can."""
        self.refuses = ""
        """Why nothing can be started; empty: it can."""
        self.changed: list[asyncio.Event] = []
        """Set when a process ends."""
        self._network = network
        self._group = group
        self._folder = folder
        self._event_log = event_log
        self._main = main
        self._pids = count(FIRST_PID)
        self._by_pid: dict[int, Process] = {}

    @property
    def alive(self) -> list[Process]:
        """Running processes, by slot and generation."""
        return [process for _, process in sorted(self.processes.items()) if process.alive]

    def start(self, slot: Slot, generation: int) -> None:
        """Start a process."""
        key, pid = (slot.id, generation), next(self._pids)
        process = Process(slot, generation, pid, self._folder / f"{slot.id}.{generation}.json")
        self.processes[key] = self._by_pid[pid] = process
        self._event_log.note("start", process.node)
        token = RUNNING.set(process)
        try:
            with self._network.node(process.node):
                process.task = self._group.create_task(self._run(process))
        finally:
            RUNNING.reset(token)

    def ask(self, process: Process) -> None:
        """SIGTERM."""
        if process.alive and not process.asked:
            process.asked = True
            self._event_log.note("ask", process.node)
            process.signal()

    def kill(self, process: Process, how: str = KILLED) -> None:
        """SIGKILL: without any clean-up of its own."""
        if process.alive:
            self._end(process, how)
            assert process.task is not None
            process.task.cancel()

    def forget(self, key: UnitKey) -> None:
        """Remove the files of an ended process."""
        process = self.processes.pop(key)
        process.endpoint_path.unlink(missing_ok=True)

    def is_alive(self, pid: int) -> bool:
        """Whether a process with this id runs."""
        process = self._by_pid.get(pid)
        return process is not None and process.alive

    async def _run(self, process: Process) -> None:
        try:
            await self._main(process)
        except ExitError as error:
            process.last_words = str(error)
            self._end(process, "ended with exit code 1")
        except asyncio.CancelledError:
            self._end(process, KILLED)
        except Exception as mistake:
            self._event_log.violated("no process crashes", f"{process.node}: {mistake!r}")
            self._end(process, "ended with exit code 70")
            raise
        else:
            self._end(process, ENDED)

    def _end(self, process: Process, how: str) -> None:
        if not process.alive:
            return
        process.alive, process.ended = False, how
        if how == ENDED:
            self._event_log.note("end", process.node)
        else:
            self._event_log.disturb(process.node, how)
        self._network.kill(process.node)
        for event in self.changed:
            event.set()


class ActionObserver(Protocol):
    """Observes control's actions."""

    def asks(self, process: Process) -> None:
        """Control is about to ask a unit to stop."""

    def done(self, what: str) -> None:
        """Control has just done a `place` or `remove`; raises to make that its last action."""


class MachineProvider:
    """The provider for this machine. `event_log` records forbidden actions."""

    def __init__(self, machine: Machine, event_log: EventLog, observer: ActionObserver | None = None) -> None:
        self._machine = machine
        self._event_log = event_log
        self._observer = observer
        self._knows = False
        self._change = asyncio.Event()
        machine.changed.append(self._change)

    async def place(self, slot: Slot, generation: int) -> None:
        machine = self._machine
        self._event_log.expect(self._knows, "no action while the units are unknown", f"place {slot.id}.{generation}")
        if machine.refuses:
            raise ProviderError(machine.refuses)
        if (slot.id, generation) in machine.processes:
            raise ProviderError(f"{slot.id} generation {generation} exists already")
        self._event_log.note("place", slot.id, generation)
        machine.start(slot, generation)
        if self._observer is not None:
            self._observer.done("place")

    async def observe(self) -> tuple[ObservedUnit, ...]:
        self._knows = not self._machine.unreachable
        if self._machine.unreachable:
            raise ProviderError(self._machine.unreachable)
        return tuple(_seen(process) for _, process in sorted(self._machine.processes.items()))

    async def remove(self, slot: str, generation: int, grace_s: float) -> None:
        self._event_log.expect(self._knows, "no action while the units are unknown", f"remove {slot}.{generation}")
        process = self._machine.processes.get((slot, generation))
        if process is None:
            return
        if not process.alive:
            if grace_s <= 0:
                self._machine.forget(process.key)
        elif grace_s <= 0:
            self._machine.kill(process)
        else:
            if self._observer is not None and not process.asked:
                self._observer.asks(process)
            self._machine.ask(process)
        if self._observer is not None:
            self._observer.done("remove")

    async def changed(self) -> None:
        await self._change.wait()
        self._change.clear()

    def close(self) -> None:
        self._machine.changed.remove(self._change)


def _seen(process: Process) -> ObservedUnit:
    slot, endpoint = process.slot, None
    if process.alive:
        try:
            endpoint = msgspec.json.decode(process.endpoint_path.read_bytes(), type=Endpoint)
        except (OSError, *UNREADABLE):
            endpoint = None
    return ObservedUnit(
        slot.id,
        process.generation,
        slot.kind,
        slot.digest,
        slot.drain_grace_s,
        process.alive,
        process.pid,
        endpoint,
        process.ended,
        process.last_words,
    )


class _System:
    """The module `os` as seen by a process of the machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def getpid(self) -> int:
        """The current process's id; 0 for a dead one, so that it cleans up nothing."""
        process = RUNNING.get()
        return process.pid if process is not None and process.alive else 0

    def kill(self, pid: int, signal: int) -> None:
        """Check whether a process exists."""
        if not self._machine.is_alive(pid):
            raise ProcessLookupError(pid)


class _NoSockets:
    """The module `socket` for probing ports: all are free, as nothing else runs on this machine."""

    AF_INET = AF_INET6 = SOL_SOCKET = SO_REUSEADDR = 0

    @staticmethod
    @contextmanager
    def socket(family: int) -> Iterator["_NoSockets"]:
        """A socket that can be bound."""
        yield _NoSockets()

    def setsockopt(self, *option: int) -> None:
        """No effect."""

    def bind(self, address: tuple[str, int]) -> None:
        """Always succeeds."""


@contextmanager
def in_place_of_the_system(machine: Machine) -> Iterator[None]:
    """Within the `with`, gateways and workers ask this machine for process ids and free ports."""
    with standing_in(*((module, "os", _System(machine)) for module in ASKS_OS), (serve, "socket", _NoSockets)):
        yield


@contextmanager
def standing_in(*names: tuple[ModuleType, str, object]) -> Iterator[None]:
    """Temporarily replace names of modules."""
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    try:
        for module, name, value in names:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
