"""What is seen of devices, and what it makes control do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Throttle(StrEnum):
    """Why a GPU runs slower than it could. That it is idle, or was told to by its owner, is no reason."""

    POWER_CAP = "power cap"
    HARDWARE = "hardware slowdown"
    HEAT = "heat"
    POWER_BRAKE = "power brake"


class Recovery(StrEnum):
    """What the driver asks for before a GPU may be used again (NVML's recovery action, driver 570 and newer)."""

    NONE = "none"
    RESET = "reset"
    REBOOT = "reboot"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """A GPU, or a MIG slice of one, as its source sees it now. None: unknown, which is neither zero nor sick."""

    device: str
    """Its id: what the driver calls it (`GPU-…`, `MIG-…`), or a script's own name for it."""
    node: str = ""
    """Where it is; a source that sees one machine leaves it to whoever asks."""
    index: int = 0
    name: str = ""
    parent: str = ""
    """The id of the GPU that this is a slice of; empty: it is whole."""
    profile: str = ""
    """Of a slice, such as `1g.10gb`."""
    pci: str = ""
    """PCI address as the kernel log writes it: domain, bus and slot."""
    numa: int | None = None
    links: tuple[str, ...] = ()
    """Ids of the GPUs that NVLink leads to, sorted."""
    life: str = ""
    """Another value means: it was reset since, or its machine was."""
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    duty: float | None = None
    """Share of the time in which it did something, 0..1."""
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    """Used since its driver was loaded."""
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    throttles: tuple[Throttle, ...] | None = None
    ecc_errors: int | None = None
    """Uncorrected ones since its driver was loaded."""
    ecc_errors_ever: int | None = None
    remap_pending: bool | None = None
    """A row of memory will be replaced at the next reset. Until then it serves: nothing has to be done."""
    remap_failed: bool | None = None
    """A row of memory could not be replaced: NVIDIA's criterion for an exchange of the GPU."""
    recovery: Recovery | None = None
    lost: bool = False
    """The driver knows it and cannot reach it."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """The driver has reported an error. `at` is wall time, seconds since the epoch."""

    at: float
    device: str
    """Its id, or its PCI address."""
    xid: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Excluded:
    """Where nothing may be placed, and what runs there moves away: names of nodes and ids of devices, with why."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)

    def why(self, node: str, devices: tuple[str, ...]) -> str:
        """Why what uses these may not stay there; empty: it may."""
        return self.nodes.get(node, "") or next((self.devices[each] for each in devices if each in self.devices), "")


NOTHING_EXCLUDED = Excluded()
