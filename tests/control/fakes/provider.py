"""In-memory units with scripted behaviour, to test control without starting processes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from forebay.core.model import Endpoint, WorkerSpec
from forebay.core.reconcile import ObservedUnit, Slot
from forebay.providers.protocol import ProviderError


@dataclass(frozen=True, slots=True)
class Script:
    """How the units of a slot behave."""

    refuse: str = ""
    """The start fails, for this reason."""
    dies: str = ""
    """It ends at once, in this way."""
    last_words: str = ""
    listens: bool = True
    obeys: bool = True
    """It ends when asked to; if not, it has to be killed."""


class MemoryProvider:
    """Holds units in a dict. `script` says how a unit behaves; `fail`, `end` and `unreachable` are the faults."""

    def __init__(self, script: Callable[[Slot, int], Script] = lambda slot, generation: Script()) -> None:
        self.unreachable = ""
        self._script = script
        self._units: dict[tuple[str, int], ObservedUnit] = {}
        self._scripts: dict[tuple[str, int], Script] = {}
        self._next_pid = 1
        self._change = asyncio.Event()

    async def place(self, slot: Slot, generation: int) -> None:
        script = self._script(slot, generation)
        if script.refuse:
            raise ProviderError(script.refuse)
        key, pid = (slot.id, generation), self._next_pid
        if key in self._units:
            raise ProviderError(f"{slot.id} generation {generation} exists already")
        self._next_pid += 1
        endpoint = Endpoint(pid, "127.0.0.1", pid) if script.listens and not script.dies else None
        unit = ObservedUnit(slot.id, generation, slot.kind, slot.digest, slot.drain_grace_s, True, pid, endpoint)
        if isinstance(spec := slot.spec, WorkerSpec):
            unit = replace(unit, node=spec.node, devices=spec.devices, cpus=spec.cpus)
            unit = replace(unit, memory_bytes=slot.memory_bytes, device_bytes=slot.device_bytes)
        self._units[key], self._scripts[key] = unit, script
        if script.dies:
            self.end(slot.id, generation, script.dies)

    async def observe(self) -> tuple[ObservedUnit, ...]:
        if self.unreachable:
            raise ProviderError(self.unreachable)
        return tuple(unit for _, unit in sorted(self._units.items()))

    async def remove(self, slot: str, generation: int, grace_s: float) -> None:
        key = slot, generation
        unit = self._units.get(key)
        if unit is None:
            return
        if not unit.alive:
            if grace_s <= 0:
                del self._units[key], self._scripts[key]
        elif grace_s <= 0:
            self.end(slot, generation, "was killed by signal 9 (SIGKILL)")
        elif self._scripts[key].obeys:
            self.end(slot, generation, "ended with exit code 0")

    async def changed(self) -> None:
        await self._change.wait()
        self._change.clear()

    def close(self) -> None:
        """Nothing is held."""

    def end(self, slot: str, generation: int, how: str) -> None:
        """Let a unit end by itself."""
        key = slot, generation
        words = self._scripts[key].last_words
        self._units[key] = replace(self._units[key], alive=False, endpoint=None, ended=how, last_words=words)
        self._change.set()
