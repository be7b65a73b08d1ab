"""NVIDIA's management library (NVML), via `nvidia-ml-py`: readings of this machine's GPUs.

Every function may be missing (older driver), unsupported (smaller GPU) or fail (faulty GPU): its value is then
unknown. A GPU is lost if the driver says so, or does not count it any more.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from forebay.core.health import DeviceEvent, DeviceReading, Recovery, Throttle
from forebay.core.health.attribution import pci_of
from forebay.providers.devices.protocol import DevicesUnknown

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
EVENTS_MAX: Final = 256
"""Events taken per call; the rest next time."""
LINKS_MAX: Final = 18
"""Per GPU: NVML_NVLINK_MAX_LINKS."""
WHOLE: Final = 0xFFFF_FFFF
"""The slice number in an event that concerns no slice."""
THROTTLES: Final = (
    (0x04, Throttle.POWER_CAP),
    (0x08, Throttle.HARDWARE),
    (0x20, Throttle.HEAT),
    (0x40, Throttle.HEAT),
    (0x80, Throttle.POWER_BRAKE),
)
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h) that mean throttling."""
RECOVERIES: Final = {
    0: Recovery.NONE,
    1: Recovery.RESET,
    2: Recovery.REBOOT,
    3: Recovery.DRAIN,
    4: Recovery.RESET,
    6: Recovery.RESET,
    7: Recovery.REBOOT,
}
"""By the number of nvmlGpuRecoveryAction_t: 4 is `drain and reset`, 6 a bus reset; others do not concern a GPU."""


@dataclass
class _Gpu:
    """The fixed properties of a GPU: it can be named even when it cannot be queried any more."""

    fixed: DeviceReading
    linked: set[tuple[int, int, int]] | None = None
    """PCI addresses of its NVLink peers."""
    slices: dict[int, str] = field(default_factory=dict)
    """Ids of its slices, by GPU instance number."""


class NvmlSource:
    """The GPUs of this machine. The library is loaded on first use, and again after a failure."""

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall = wall_s
        self._nvml: Any = None
        self._gpus: dict[str, _Gpu] = {}
        """By id; `_at` by index, which changes when a GPU falls off the bus."""
        self._at: dict[int, str] = {}
        self._events: Any = None
        self._watched: set[str] = set()

    def readings(self) -> tuple[DeviceReading, ...]:
        nvml = self._opened()
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self.close()
            raise DevicesUnknown(f"NVML: {error}") from error
        found = {reading.device: reading for index in range(count) for reading in self._device(index)}
        for id, gpu in self._gpus.items():
            if id not in found:
                found.update({reading.device: reading for reading in self._lost(gpu)})
        return tuple(replace(found[id], links=self._links(id)) for id in sorted(found))

    def events(self) -> tuple[DeviceEvent, ...]:
        nvml = self._opened()
        self._watch()
        happened: list[DeviceEvent] = []
        while self._events is not None and len(happened) < EVENTS_MAX:
            try:
                data = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError_Timeout:
                break
            except nvml.NVMLError:  # a lost GPU breaks the event set: it is created anew
                self._unwatch()
                break
            device = self._hit(data)
            if device:
                happened.append(DeviceEvent(self._wall(), device, int(data.eventData)))
        return tuple(happened)

    def close(self) -> None:
        self._unwatch()
        if self._nvml is not None:
            nvml, self._nvml = self._nvml, None
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _opened(self) -> Any:
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                raise DevicesUnknown("nvidia-ml-py is missing: pip install 'forebay[gpu]'") from None
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise DevicesUnknown(f"NVML: {error}") from error
            self._nvml = pynvml
        return self._nvml

    def _get(self, name: str, *arguments: Any) -> Any:
        """The result of a function, or None if it fails. Raises only for a lost GPU."""
        nvml = self._nvml
        function = getattr(nvml, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError:
            return None

    def _device(self, index: int) -> Iterator[DeviceReading]:
        """A GPU and its slices; nothing for one that was never identified."""
        known = self._gpus.get(self._at.get(index, ""))
        try:
            handle = self._get("nvmlDeviceGetHandleByIndex", index)
            fixed = None if handle is None else self._fixed(index, handle)
            if fixed is None:
                if known is not None:
                    yield known.fixed
                return
            self._at[index] = fixed.device
            gpu = self._gpus.setdefault(fixed.device, _Gpu(fixed))
            whole = self._whole(gpu, handle)
            yield whole
            yield from self._slices(gpu, handle, whole)
        except self._nvml.NVMLError_GpuIsLost:
            if known is not None:
                yield from self._lost(known)

    def _lost(self, gpu: _Gpu) -> Iterator[DeviceReading]:
        lost = replace(gpu.fixed, life=_life(), lost=True)
        yield lost
        for id in gpu.slices.values():
            yield replace(lost, device=id, parent=lost.device)

    def _fixed(self, index: int, handle: Any) -> DeviceReading | None:
        uuid = _text(self._get("nvmlDeviceGetUUID", handle))
        if not uuid:
            return None
        pci = self._get("nvmlDeviceGetPciInfo", handle)
        name = _text(self._get("nvmlDeviceGetName", handle))
        numa = self._get("nvmlDeviceGetNumaNodeId", handle)
        address = _text(pci.busId) if pci is not None else ""
        return DeviceReading(uuid, index=index, name=name, pci=address, numa=numa)

    def _whole(self, gpu: _Gpu, handle: Any) -> DeviceReading:
        nvml, get = self._nvml, self._get
        memory = get("nvmlDeviceGetMemoryInfo", handle)
        busy = get("nvmlDeviceGetUtilizationRates", handle)
        power_mw = get("nvmlDeviceGetPowerUsage", handle)
        limit_mw = get("nvmlDeviceGetEnforcedPowerLimit", handle)
        energy_mj = get("nvmlDeviceGetTotalEnergyConsumption", handle)
        remapped = get("nvmlDeviceGetRemappedRows", handle)
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        if gpu.linked is None:
            gpu.linked = self._linked(handle)
        return replace(
            gpu.fixed,
            life=_life(),
            memory_bytes=None if memory is None else int(memory.total),
            memory_used_bytes=None if memory is None else int(memory.used),
            duty=None if busy is None else busy.gpu / 100,
            temperature_c=get("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            energy_j=None if energy_mj is None else energy_mj / 1000,
            clock_mhz=get("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            clock_max_mhz=get("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            throttles=self._throttles(handle),
            ecc_errors=get("nvmlDeviceGetTotalEccErrors", handle, uncorrected, nvml.NVML_VOLATILE_ECC),
            ecc_errors_ever=get("nvmlDeviceGetTotalEccErrors", handle, uncorrected, nvml.NVML_AGGREGATE_ECC),
            remap_pending=None if remapped is None else bool(remapped[2]),
            remap_failed=None if remapped is None else bool(remapped[3]),
            recovery=self._recovery(handle),
        )

    def _throttles(self, handle: Any) -> tuple[Throttle, ...] | None:
        bits = self._get("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:  # its name before driver 535
            bits = self._get("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return None if bits is None else throttles_of(bits)

    def _recovery(self, handle: Any) -> Recovery | None:
        number = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = None if number is None else self._get("nvmlDeviceGetFieldValues", handle, [number])
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return RECOVERIES.get(int(values[0].value.uiVal))

    def _linked(self, handle: Any) -> set[tuple[int, int, int]]:
        """PCI addresses of direct NVLink peers."""
        addresses = set()
        for link in range(LINKS_MAX):
            if self._get("nvmlDeviceGetNvLinkState", handle, link) == self._nvml.NVML_FEATURE_ENABLED:
                remote = self._get("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
                address = None if remote is None else pci_of(_text(remote.busId))
                if address is not None:
                    addresses.add(address)
        return addresses

    def _links(self, id: str) -> tuple[str, ...]:
        """Ids of the GPUs linked to a GPU, directly or via a common switch."""
        own = self._gpus[id].linked if id in self._gpus else None
        if not own:
            return ()
        addresses = {pci_of(gpu.fixed.pci): other for other, gpu in self._gpus.items()}
        switches = own - addresses.keys()
        found = {addresses[each] for each in own if each in addresses}
        found |= {other for other, gpu in self._gpus.items() if gpu.linked and gpu.linked & switches}
        return tuple(sorted(found - {id}))

    def _slices(self, gpu: _Gpu, handle: Any, whole: DeviceReading) -> Iterator[DeviceReading]:
        mode = self._get("nvmlDeviceGetMigMode", handle)
        if not mode or mode[0] != self._nvml.NVML_DEVICE_MIG_ENABLE:
            gpu.slices = {}
            return
        for place in range(self._get("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            own = self._get("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
            uuid = "" if own is None else _text(self._get("nvmlDeviceGetUUID", own))
            if not uuid:
                continue
            number = self._get("nvmlDeviceGetGpuInstanceId", own)
            if number is not None:
                gpu.slices[number] = uuid
            name = _text(self._get("nvmlDeviceGetName", own))
            memory = self._get("nvmlDeviceGetMemoryInfo", own)
            yield DeviceReading(
                uuid,
                index=whole.index,
                name=name,
                parent=whole.device,
                profile=profile_of(name),
                memory_bytes=None if memory is None else int(memory.total),
                memory_used_bytes=None if memory is None else int(memory.used),
            )

    def _watch(self) -> None:
        """Register for errors of GPUs that are not watched yet; GPUs without events are skipped."""
        nvml = self._nvml
        if self._events is None:
            self._events, self._watched = self._get("nvmlEventSetCreate"), set()
        for id in sorted(set(self._gpus) - self._watched) if self._events is not None else ():
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(id)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
            except nvml.NVMLError_NotSupported:
                pass
            except nvml.NVMLError:
                continue
            self._watched.add(id)

    def _unwatch(self) -> None:
        if self._events is not None and self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
        self._events, self._watched = None, set()

    def _hit(self, data: Any) -> str:
        """The id of the device of an event; empty: unknown."""
        try:
            id = _text(self._get("nvmlDeviceGetUUID", data.device))
        except self._nvml.NVMLError_GpuIsLost:
            id = ""
        if not id:  # a lost GPU cannot be identified: if one is lost, assume it is that one
            lost = [reading.device for index in sorted(self._at) for reading in self._device(index) if reading.lost]
            return lost[0] if lost else ""
        gpu, number = self._gpus.get(id), int(data.gpuInstanceId)
        return id if gpu is None or number == WHOLE else gpu.slices.get(number, id)


def throttles_of(bits: int) -> tuple[Throttle, ...]:
    """The throttle reasons in NVML's and DCGM's bit field."""
    return tuple(sorted({throttle for bit, throttle in THROTTLES if bits & bit}))


def profile_of(name: str) -> str:
    """The MIG profile in the name of a slice, such as `NVIDIA H100 MIG 1g.10gb`."""
    found = re.search(r"\bMIG (\S+)", name)
    return found[1] if found else ""


def _life() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
