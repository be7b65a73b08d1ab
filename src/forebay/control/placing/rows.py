"""The nodes with their used resources as documents, for `forebay nodes`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forebay.core.placement.taken import Taken
from forebay.core.placement.values import Claim, Node, Placement
from forebay.core.reconcile import UnitKey


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    """A GPU or a slice of one. Sizes in bytes; `taken_bytes`: the estimated need of its replicas."""

    id: str
    name: str
    kind: str
    profile: str
    memory_bytes: int
    taken_bytes: int
    foreign_bytes: int
    barred: str
    """Why nothing may run here; empty: it may."""


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """A unit on a node, possibly leaving it."""

    slot: str
    generation: int
    devices: tuple[str, ...]
    cpus: tuple[int, ...]
    memory_bytes: int
    """Its estimated need."""
    memory_used_bytes: int
    """Its measured use; 0: not known yet."""
    leaves: bool
    why: str
    """Why it should be elsewhere; empty: it is where it should be."""


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node. Sizes in bytes."""

    name: str
    fallback: bool
    barred: str
    labels: tuple[str, ...]
    cpus: tuple[int, ...]
    memory_bytes: int
    memory_taken_bytes: int
    devices: tuple[PlacedDevice, ...]
    replicas: tuple[PlacedReplica, ...]


def make_rows(
    nodes: Iterable[Node],
    claims: Mapping[UnitKey, Claim],
    placement: Placement,
    used: Mapping[UnitKey, int],
) -> tuple[PlacedNode, ...]:
    """The nodes by name."""
    taken = Taken(claims.values())
    return tuple(
        PlacedNode(
            name=node.name,
            fallback=node.fallback,
            barred=node.barred,
            labels=tuple(sorted(node.labels)),
            cpus=node.cpus,
            memory_bytes=node.memory_bytes,
            memory_taken_bytes=taken.memory_bytes[node.name],
            devices=tuple(
                PlacedDevice(
                    device.id,
                    device.name,
                    device.kind,
                    device.profile,
                    device.memory_bytes,
                    taken.device_bytes[node.name, device.id],
                    device.foreign_bytes,
                    device.barred,
                )
                for device in node.devices
            ),
            replicas=tuple(
                PlacedReplica(
                    slot,
                    generation,
                    claim.spot.devices,
                    claim.spot.cpus,
                    claim.memory_bytes,
                    used.get((slot, generation), 0),
                    claim.leaves,
                    "" if claim.leaves else placement.stays.get(slot, ""),
                )
                for (slot, generation), claim in sorted(claims.items())
                if claim.spot.node == node.name
            ),
        )
        for node in nodes
    )
