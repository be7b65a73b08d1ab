"""The memory that replicas actually use, compared with their estimated need."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from forebay.core.placement.values import Need, gib
from forebay.core.reconcile import Kind, ObservedUnit, UnitKey
from forebay.providers.footprint import used_bytes

MEASURE_EVERY_S: Final = 15.0
"""Measuring reads a line for each mapping of each process: some milliseconds per replica, in a thread."""
MARGIN: Final = 0.5
"""The tolerated error of an estimate, as a share of it; a replica that uses more is reported."""


class Footprints:
    """Measures periodically. `used`: the results in bytes, by unit; units that are gone are removed."""

    def __init__(
        self, note: Callable[[str, str], None], read: Callable[[Iterable[int]], dict[int, int]] = used_bytes
    ):
        self._note = note
        self._read = read
        self._told: set[UnitKey] = set()
        self.used: Mapping[UnitKey, int] = {}

    async def run(self, units: Callable[[], Iterable[ObservedUnit]], needs: Callable[[], Mapping[str, Need]]) -> None:
        """Measure until cancelled."""
        while True:
            await self.measure(list(units()), needs())
            await asyncio.sleep(MEASURE_EVERY_S)

    async def measure(self, units: Iterable[ObservedUnit], needs: Mapping[str, Need]) -> None:
        """Measure once. Reports each unit once that uses far more than estimated."""
        pids = {unit.key: unit.pid for unit in units if unit.alive and unit.kind is Kind.REPLICA and unit.pid}
        found = await asyncio.to_thread(self._read, sorted(pids.values()))
        self.used = {key: found[pid] for key, pid in sorted(pids.items()) if pid in found}
        self._told &= self.used.keys()
        for key, used in self.used.items():
            need = needs.get(key[0])
            if need is None or need.gpus or key in self._told or used <= need.memory_bytes * (1 + MARGIN):
                continue
            self._told.add(key)
            text = f"{key[0]} uses {gib(used)} GiB of memory and was estimated to need {gib(need.memory_bytes)}"
            self._note("memory", f"{text}: set a higher `placement.memory_gib` for {need.model}")
