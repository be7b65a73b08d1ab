"""Opens the device sources that the settings select."""

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
"""One of these exists where NVIDIA's driver is installed. Loading its library takes seconds on some machines."""
LOCAL: Final = "local"
"""The node of this machine's devices."""


def open_sources(settings: HealthSettings) -> Mapping[str, DeviceSource]:
    """The device sources, by node."""
    sources: dict[str, DeviceSource] = {}
    match settings.source:
        case "dcgm":
            sources = {name: DcgmSource(url, wall_s) for name, url in sorted(settings.exporters.items())}
        case "scripted":
            assert settings.file is not None  # checked by core.cluster
            sources = {LOCAL: ScriptedSource(Path(settings.file).absolute(), time.monotonic, wall_s)}
        case "nvml":
            sources = {LOCAL: NvmlSource(wall_s)}
        case "auto":
            if any(path.exists() for path in DRIVER):
                sources = {LOCAL: NvmlSource(wall_s)}
    if settings.kernel_log is not None:
        sources[LOCAL] = KernelLog(Path(settings.kernel_log).absolute(), sources.get(LOCAL), wall_s)
    return sources
