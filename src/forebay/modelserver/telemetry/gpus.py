"""What the machine's GPUs do, by Triton's names; looked at in a thread, since their driver may take seconds."""

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
"""Each with the label `gpu_uuid`."""


class Gpus:
    """The last readings of the GPUs."""

    def __init__(self, source: DeviceSource, every_s: float, log: structlog.stdlib.BoundLogger) -> None:
        self._source = source
        self._every_s = every_s
        self._log = log
        self._readings: tuple[DeviceReading, ...] = ()
        self._began_j: dict[str, float] = {}
        """By GPU: what it had used when it was first seen."""

    async def run(self) -> None:
        """Look again and again, until cancelled; without a driver that answers, say why and end."""
        try:
            while True:
                await self.look_now()
                await asyncio.sleep(self._every_s)
        except DevicesUnknown as error:
            self._readings = ()
            self._log.warning("no metrics of GPUs", why=str(error))
        finally:
            self._source.close()

    async def look_now(self) -> None:
        """Ask the driver. Raises `DevicesUnknown`."""
        self._readings = await asyncio.to_thread(self._source.readings)
        for each in self._readings:
            if each.energy_j is not None:
                self._began_j.setdefault(each.device, each.energy_j)

    def look(self) -> Iterator[tuple[Row, str, float]]:
        """What is known: each metric, the GPU's id, and the value. Slices are parts of their GPU."""
        for each in self._readings:
            if each.parent or each.lost:
                continue
            used_j = None if each.energy_j is None else each.energy_j - self._began_j[each.device]
            memory = each.memory_bytes, each.memory_used_bytes
            values = each.duty, *memory, each.power_w, each.power_limit_w, used_j
            for row, value in zip(TABLE, values, strict=True):
                if value is not None:
                    yield row, each.device, value
