"""GPU metrics with Triton's names. Read in a thread, since the driver may take seconds."""

import asyncio
from collections.abc import Iterator
from typing import Final

import structlog

from forebay.core.health import DeviceReading
from forebay.modelserver.telemetry.rows import Row
from forebay.providers.devices.protocol import DeviceSource, DevicesUnknown

UTILISATION: Final = Row("nv_gpu_utilization", "gauge", "GPU utilization, 0 to 1.")
TOTAL: Final = Row("nv_gpu_memory_total_bytes", "gauge", "Total GPU memory.")
USED: Final = Row("nv_gpu_memory_used_bytes", "gauge", "Used GPU memory.")
POWER: Final = Row("nv_gpu_power_usage", "gauge", "GPU power draw, watts.")
LIMIT: Final = Row("nv_gpu_power_limit", "gauge", "GPU power limit, watts.")
ENERGY: Final = Row("nv_energy_consumption", "counter", "GPU energy consumption since the server's start, joules.")
TABLE: Final = (UTILISATION, TOTAL, USED, POWER, LIMIT, ENERGY)
"""All have the label `gpu_uuid`."""


class Gpus:
    """The latest readings of the GPUs."""

    def __init__(self, source: DeviceSource, every_s: float, log: structlog.stdlib.BoundLogger) -> None:
        self._source = source
        self._every_s = every_s
        self._log = log
        self._readings: tuple[DeviceReading, ...] = ()
        self._began_j: dict[str, float] = {}
        """Energy reading of each GPU when it was first seen."""

    async def run(self) -> None:
        """Poll until cancelled; without a working driver, log why and return."""
        try:
            while True:
                await self.look_now()
                await asyncio.sleep(self._every_s)
        except DevicesUnknown as error:
            self._give_up(str(error))
        except Exception as mistake:  # supervisor: a driver's library may raise anything, and must not end the server
            self._give_up(f"{type(mistake).__name__}: {mistake}")
        finally:
            self._source.close()

    def _give_up(self, why: str) -> None:
        self._readings = ()
        self._log.warning("no metrics of GPUs", why=why)

    async def look_now(self) -> None:
        """Read from the driver. Raises `DevicesUnknown`."""
        self._readings = await asyncio.to_thread(self._source.readings)
        for each in self._readings:
            if each.energy_j is not None:
                self._began_j.setdefault(each.device, each.energy_j)

    def look(self) -> Iterator[tuple[Row, str, float]]:
        """Metric, GPU id and value for every known reading. Slices are covered by their GPU."""
        for each in self._readings:
            if each.parent or each.lost:
                continue
            used_j = None if each.energy_j is None else each.energy_j - self._began_j[each.device]
            memory = each.memory_bytes, each.memory_used_bytes
            values = each.duty, *memory, each.power_w, each.power_limit_w, used_j
            for row, value in zip(TABLE, values, strict=True):
                if value is not None:
                    yield row, each.device, value
