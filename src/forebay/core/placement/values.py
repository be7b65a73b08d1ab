"""Inputs and results of placement: nodes with devices, replicas' needs, and spots. Sizes are bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a MIG slice, which holds replicas of its own."""

    id: str
    """The driver's id, for `CUDA_VISIBLE_DEVICES`; unique within the cluster."""
    name: str
    """Display name: `GPU 0`."""
    memory_bytes: int
    kind: str = ""
    """Its product, as in the cluster file; empty: unknown."""
    profile: str = ""
    """For a MIG slice, such as `1g.10gb`; empty: a whole GPU."""
    foreign_bytes: int = 0
    """Memory used by other programs."""
    links: frozenset[str] = frozenset()
    """Ids of the devices connected by NVLink."""
    numa: int | None = None
    """The closest NUMA node."""
    barred: str = ""
    """Why nothing may run here; empty: it may."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or a part of one."""

    name: str
    memory_bytes: int
    cpus: tuple[int, ...] = ()
    """Cores that its replicas may run on; none: not stated."""
    devices: tuple[Device, ...] = ()
    numa: tuple[tuple[int, ...], ...] = ()
    """Cores by NUMA node."""
    labels: frozenset[str] = frozenset()
    fallback: bool = False
    """Only for low-priority models, which run here without GPUs."""
    barred: str = ""
    """Why nothing may run here; empty: it may."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one replica needs."""

    slot: str
    model: str
    memory_bytes: int = 0
    """Memory of the node."""
    gpus: int = 0
    """Devices per replica, each with an equal part of it; 0: none."""
    device_bytes: int = 0
    """Memory of each of these devices."""
    fraction: float = 0.0
    """Share of each device's memory that it reserves, 0..1; 0: `device_bytes`."""
    whole: bool = False
    """It shares its devices with no other replica."""
    fallback_bytes: int = 0
    """Memory of a fallback node, where it runs without GPUs."""
    cpus: int = 0
    """Reserved cores, exclusive among replicas that reserve any; 0: it shares the node's cores."""
    kinds: frozenset[str] = frozenset()
    """Acceptable GPU products; none: all."""
    profile: str = ""
    """Required MIG profile; empty: any device with enough memory."""
    nodes: frozenset[str] = frozenset()
    """Acceptable nodes; none: all."""
    labels: frozenset[str] = frozenset()
    """Labels that a node must have."""
    low_priority: bool = False
    spread: bool = True
    """Prefer nodes with fewer replicas of the model; otherwise prefer the fullest nodes."""
    linked: bool = False
    """All its devices must be connected by NVLink; otherwise this is only preferred."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a replica runs."""

    node: str
    devices: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """The resources of a replica on a spot. A slot can have several claims while units of it are leaving."""

    slot: str
    model: str
    spot: Spot
    memory_bytes: int = 0
    device_bytes: tuple[int, ...] = ()
    """On each of its devices."""
    leaves: bool = False
    """It was told to stop: its resources are not free yet, but it no longer holds its slot."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The spots of slots, and the reasons for those that cannot run, or not where they should."""

    spots: Mapping[str, Spot] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)
    """Slots without a spot."""
    moves: Mapping[str, str] = field(default_factory=dict)
    """Slots that leave their current spot for the new one."""
    stays: Mapping[str, str] = field(default_factory=dict)
    """Slots that should leave their spot but fit nowhere else."""


def gib(size: int) -> str:
    """Bytes in GiB with at most one decimal: `12.1`, `24`."""
    return f"{size / GIB:.1f}".removesuffix(".0")
