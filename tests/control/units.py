"""Slots for tests, and waiting for what a provider observes."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from forebay.core.model import Task, WorkerSpec
from forebay.core.reconcile import Kind, ObservedUnit, Slot
from forebay.providers.local import LocalProvider
from forebay.providers.processes import session_leaders
from forebay.providers.protocol import Provider

STAND_IN = (sys.executable, "-S", "-E", str(Path(__file__).with_name("stand_in.py")))
COMMANDS = {Kind.REPLICA: STAND_IN, Kind.GATEWAY: STAND_IN}
WAIT_S = 15.0
POLL_S = 0.02


def worker(slot: str, behave: str = "well") -> WorkerSpec:
    model = slot.rsplit("-", 1)[0]
    return WorkerSpec(slot, 0, model, "r-1", Task.CHAT, "synthetic", "", "", settings={"behave": behave})


def replica(slot: str = "chat-0", behave: str = "well", digest: str = "d1", grace_s: float = 5.0) -> Slot:
    model, index = slot.rsplit("-", 1)
    spec = worker(slot, behave)
    return Slot(slot, Kind.REPLICA, model, int(index), digest, spec, drain_grace_s=grace_s)


def local(folder: Path, env: dict[str, str] | None = None) -> LocalProvider:
    return LocalProvider(folder, COMMANDS, env or {})


async def seen(provider: Provider, slot: str, generation: int = 1) -> ObservedUnit | None:
    units = {u.key: u for u in await provider.observe()}
    return units.get((slot, generation))


async def wait_for(
    provider: Provider, slot: str, holds: Callable[[ObservedUnit], object], generation: int = 1
) -> ObservedUnit:
    """Observe until the unit is as wanted."""
    last = None
    with suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            while True:
                last = await seen(provider, slot, generation)
                if last and holds(last):
                    return last
                await asyncio.sleep(POLL_S)
    raise AssertionError(f"{slot} generation {generation} is {last}")


def kill_all(folder: Path) -> None:
    """End every unit below the folder, whoever started it."""
    for pid, _ in session_leaders(folder / "units"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
