"""What placement decides on: nodes with their devices, what replicas need, and where they are. Sizes are bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a slice of one that holds replicas of its own (MIG)."""

    id: str
    """As its driver names it, for `CUDA_VISIBLE_DEVICES`; unique within the cluster."""
    name: str
    """For people: `GPU 0`."""
    memory_bytes: int
    kind: str = ""
    """Its product, as in the cluster file; empty: unknown."""
    profile: str = ""
    """Of a MIG slice, such as `1g.10gb`; empty: a whole GPU."""
    foreign_bytes: int = 0
    """Memory that is used by what Forebay does not run."""
    links: frozenset[str] = frozenset()
    """Ids of the devices that NVLink joins it to."""
    numa: int | None = None
    """The part of the machine that it is near to."""
    barred: str = ""
    """Why nothing may run here; empty: it may."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or a part of one."""

    name: str
    memory_bytes: int
    cpus: tuple[int, ...] = ()
    """Cores that its replicas run on; none: nobody has said."""
    devices: tuple[Device, ...] = ()
    numa: tuple[tuple[int, ...], ...] = ()
    """Cores by part of the machine."""
    labels: frozenset[str] = frozenset()
    fallback: bool = False
    """Only for models of low priority, also for those that would rather have GPUs."""
    barred: str = ""
    """Why nothing may run here; empty: it may."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one replica needs."""

    slot: str
    model: str
    memory_bytes: int = 0
    """Of the node."""
    gpus: int = 0
    """Devices of one replica, with equal shares of it; 0: none."""
    device_bytes: int = 0
    """Of each of these devices."""
    fraction: float = 0.0
    """The share of each device's memory that it takes for itself, 0..1; 0: `device_bytes`."""
    whole: bool = False
    """It shares its devices with nobody."""
    fallback_bytes: int = 0
    """Of the memory of a fallback node, where it runs without its GPUs."""
    cpus: int = 0
    """Cores that no other replica with cores of its own may have; 0: those of the node, with all others."""
    kinds: frozenset[str] = frozenset()
    """Products of GPUs that will do; none: all."""
    profile: str = ""
    """The MIG slices that will do; empty: whatever has the memory."""
    nodes: frozenset[str] = frozenset()
    """Nodes that will do; none: all."""
    labels: frozenset[str] = frozenset()
    """Labels that a node must have."""
    low_priority: bool = False
    spread: bool = True
    """Rather on a node that has fewer replicas of the model; if not, rather where most room is taken."""
    linked: bool = False
    """Its devices must all be joined by NVLink; if not, they rather are."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a replica is."""

    node: str
    devices: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """What a replica takes there. `slot` says whose it is: one slot can have several, while units of it leave."""

    slot: str
    model: str
    spot: Spot
    memory_bytes: int = 0
    device_bytes: tuple[int, ...] = ()
    """Of each of its devices."""
    leaves: bool = False
    """It was told to stop: its room is not free yet, but its slot is not here any more."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the slots are to run, and of those that can run nowhere, or not where they should, why."""

    spots: Mapping[str, Spot] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)
    """Slots without a spot."""
    moves: Mapping[str, str] = field(default_factory=dict)
    """Slots that leave the spot they have for the one here."""
    stays: Mapping[str, str] = field(default_factory=dict)
    """Slots that ought to leave the spot they have, and have nowhere to go."""


def gib(size: int) -> str:
    """Bytes in GiB, with one digit after the point and none for whole numbers: `12.1`, `24`."""
    return f"{size / GIB:.1f}".removesuffix(".0")
