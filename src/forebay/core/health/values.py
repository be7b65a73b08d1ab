"""Observations of devices, and the exclusions that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Throttle(StrEnum):
    """Why a GPU is throttled. Idle clocks and clocks set by the owner do not count."""

    POWER_CAP = "power cap"
    HARDWARE = "hardware slowdown"
    HEAT = "heat"
    POWER_BRAKE = "power brake"


class Recovery(StrEnum):
    """What the driver requires before a GPU may be used again (NVML's recovery action, driver 570 and newer)."""

    NONE = "none"
    RESET = "reset"
    REBOOT = "reboot"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """The current reading of a GPU or MIG slice. None: unknown, which is neither zero nor faulty."""

    device: str
    """Its id: the driver's (`GPU-…`, `MIG-…`), or a script's own name for it."""
    node: str = ""
    """Its node; a source for a single machine leaves it to the caller."""
    index: int = 0
    name: str = ""
    parent: str = ""
    """For a slice, the id of its GPU; empty: a whole GPU."""
    profile: str = ""
    """For a slice, such as `1g.10gb`."""
    pci: str = ""
    """PCI address as the kernel log writes it: domain, bus and slot."""
    numa: int | None = None
    links: tuple[str, ...] = ()
    """Ids of the GPUs connected by NVLink, sorted."""
    life: str = ""
    """Changes when it, or its machine, is reset."""
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    duty: float | None = None
    """Share of the time in which it was busy, 0..1."""
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    """Since its driver was loaded."""
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    throttles: tuple[Throttle, ...] | None = None
    ecc_errors: int | None = None
    """Uncorrected errors since its driver was loaded."""
    ecc_errors_ever: int | None = None
    remap_pending: bool | None = None
    """A row of memory will be remapped at the next reset. Until then it works: no action is needed."""
    remap_failed: bool | None = None
    """A row of memory could not be remapped: NVIDIA's criterion for replacing the GPU."""
    recovery: Recovery | None = None
    lost: bool = False
    """The driver knows it but cannot reach it."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """An error reported by the driver. `at` is wall time, seconds since the epoch."""

    at: float
    device: str
    """Its id, or its PCI address."""
    xid: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Excluded:
    """Nodes and devices where nothing may be placed and from which replicas move away, by name or id, with
    reasons."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)

    def why(self, node: str, devices: tuple[str, ...]) -> str:
        """Why a replica that uses these may not stay there; empty: it may."""
        return self.nodes.get(node, "") or next((self.devices[each] for each in devices if each in self.devices), "")


NOTHING_EXCLUDED = Excluded()
