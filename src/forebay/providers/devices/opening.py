"""Which sources the settings ask for."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from forebay.core.health.settings import HealthSettings
from forebay.obs.clock import wall_s
from forebay.providers.devices.dcgm import DcgmSource
from forebay.providers.devices.kernel import KernelLog
from forebay.providers.devices.nvml import NvmlSource
from forebay.providers.devices.protocol import DeviceSource
from forebay.providers.devices.scripted import ScriptedSource

DRIVER: Final = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
"""Where there is NVIDIA's driver, one of these is. To ask its library takes seconds on some machines."""
LOCAL: Final = "local"
"""The node that the devices of this machine are on."""


def open_sources(settings: HealthSettings) -> Mapping[str, DeviceSource]:
    """A source for each node that has one."""
    sources: dict[str, DeviceSource] = {}
    match settings.source:
        case "dcgm":
            sources = {name: DcgmSource(url, wall_s) for name, url in sorted(settings.exporters.items())}
        case "scripted":
            assert settings.file is not None  # as core.cluster has checked
            sources = {LOCAL: ScriptedSource(Path(settings.file).absolute(), time.monotonic, wall_s)}
        case "nvml":
            sources = {LOCAL: NvmlSource(wall_s)}
        case "auto":
            if any(path.exists() for path in DRIVER):
                sources = {LOCAL: NvmlSource(wall_s)}
    if settings.kernel_log is not None:
        sources[LOCAL] = KernelLog(Path(settings.kernel_log).absolute(), sources.get(LOCAL), wall_s)
    return sources
