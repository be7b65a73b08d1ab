"""The nodes for placement: from the cluster file, the machine, and the state of the devices."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from forebay.core.health.values import DeviceReading, Excluded
from forebay.core.placement.settings import LOCAL, GpuSettings, NodeSettings, cpu_list, gpu_id
from forebay.core.placement.values import GIB, Claim, Device, Node
from forebay.providers.machine import Machine

FOREIGN_STEP_BYTES: Final = 64 * 1024**2
"""Memory used by others is rounded up to this, so that placements do not change with every reading."""
USUAL: Final = (NodeSettings(name=LOCAL),)
"""The nodes of a cluster whose file names none."""


def make_nodes(
    settings: Sequence[NodeSettings], machine: Machine, readings: Mapping[str, DeviceReading], excluded: Excluded
) -> tuple[Node, ...]:
    """The nodes by name, with their total memory."""
    nodes = [_node(each, machine, readings, excluded) for each in settings or USUAL]
    return tuple(sorted(nodes, key=lambda node: node.name))


def with_foreign(
    nodes: Iterable[Node], readings: Mapping[str, DeviceReading], claims: Iterable[Claim]
) -> tuple[Node, ...]:
    """The nodes including memory used by others: the total use of each device that `claims` do not explain."""
    own: dict[str, int] = {}
    for claim in claims:
        for id, size in zip(claim.spot.devices, claim.device_bytes, strict=True):
            own[id] = own.get(id, 0) + size

    def changed(device: Device) -> Device:
        reading = readings.get(device.id)
        used = reading.memory_used_bytes if reading else None
        foreign = max((used or 0) - own.get(device.id, 0), 0)
        steps = -(-foreign // FOREIGN_STEP_BYTES)
        return replace(device, foreign_bytes=steps * FOREIGN_STEP_BYTES) if steps else device

    return tuple(replace(node, devices=tuple(map(changed, node.devices))) if node.devices else node for node in nodes)


def _node(
    settings: NodeSettings, machine: Machine, readings: Mapping[str, DeviceReading], excluded: Excluded
) -> Node:
    if settings.gpus is None:
        devices = _found(settings.name, readings)
    else:
        devices = [device for place, gpu in enumerate(settings.gpus) for device in _declared(gpu, place)]
    cpus = cpu_list(settings.cpus) if settings.cpus else machine.cpus
    return Node(
        name=settings.name,
        memory_bytes=round(settings.memory_gib * GIB) if settings.memory_gib else machine.memory_bytes,
        cpus=cpus,
        devices=tuple(replace(device, barred=excluded.devices.get(device.id, "")) for device in devices),
        numa=tuple(tuple(cpu for cpu in part if cpu in cpus) for part in machine.numa),
        labels=frozenset(settings.labels),
        fallback=settings.role == "fallback",
        barred=excluded.nodes.get(settings.name, ""),
    )


def _declared(gpu: GpuSettings, place: int) -> list[Device]:
    """A GPU of the cluster file, or its slices."""
    id, name = gpu_id(gpu, place), f"GPU {place}"
    if not gpu.mig:
        size = round(gpu.memory_gib * GIB)
        return [Device(id, name, size, gpu.kind, links=frozenset(gpu.links), numa=gpu.numa)]
    return [
        Device(s.id, f"slice {number} of {name}", round(s.memory_gib * GIB), gpu.kind, s.profile, numa=gpu.numa)
        for number, s in enumerate(gpu.mig)
    ]


def _found(node: str, readings: Mapping[str, DeviceReading]) -> list[Device]:
    """The devices that a source has found on a node; for a divided GPU, its slices."""
    own = {id: reading for id, reading in readings.items() if (reading.node or LOCAL) == node}
    divided = {reading.parent for reading in own.values() if reading.parent}
    devices = []
    for id, reading in sorted(own.items(), key=lambda item: (item[1].index, item[0])):
        if id in divided or reading.memory_bytes is None:
            continue
        parent = own.get(reading.parent)
        name = f"GPU {reading.index}" if not reading.parent else f"slice {id}"
        kind = reading.name if parent is None else parent.name
        numa = reading.numa if parent is None else parent.numa
        links = frozenset(reading.links)
        devices.append(Device(id, name, reading.memory_bytes, kind, reading.profile, links=links, numa=numa))
    return devices
