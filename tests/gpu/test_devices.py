"""What NVIDIA's own tools say of a real GPU, and what we do."""

import subprocess

from tests.e2e.cluster import wait_for

from forebay.core.health import Recovery
from forebay.obs.clock import wall_s
from forebay.providers.devices.nvml import NvmlSource


def queried(*fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return [each.strip() for each in subprocess.check_output(command, text=True).splitlines()[0].split(",")]


def test_readings_are_those_of_nvidia_smi() -> None:
    source = NvmlSource(wall_s)
    try:
        reading = source.readings()[0]
        fields = ("uuid", "name", "memory.total", "power.limit", "clocks.max.sm", "index")
        uuid, name, memory_mib, limit_w, clock_mhz, index = queried(*fields)
        assert (reading.device, reading.name, reading.index) == (uuid, name, int(index))
        assert reading.memory_bytes is not None
        assert abs(reading.memory_bytes / 2**20 - float(memory_mib)) < 1
        assert reading.power_limit_w == float(limit_w)
        assert reading.clock_max_mhz == float(clock_mhz)
        assert reading.ecc_errors == 0
        assert (reading.remap_failed, reading.lost, reading.parent) == (False, False, "")
        assert reading.recovery in (Recovery.NONE, None)
        temperature = float(queried("temperature.gpu")[0])
        assert reading.temperature_c is not None
        assert abs(reading.temperature_c - temperature) <= 3
        assert source.events() == ()
        wait_for("energy is used", lambda: (source.readings()[0].energy_j or 0) > (reading.energy_j or 0))
    finally:
        source.close()
