"""How one replica could be placed on one node: all options, best first, or why there is none."""

from collections.abc import Iterable, Sequence
from itertools import combinations, islice
from math import comb
from typing import Final, NamedTuple

from forebay.core.placement.taken import Taken, device_need_bytes, runs_without_gpus
from forebay.core.placement.values import Device, Need, Node, Spot, gib

GROUPS_MAX: Final = 512
"""Most groups of devices that are compared: all of 8 of 10 GPUs. On larger nodes, groups are grown greedily from each
device by its best neighbours."""


class Rank(NamedTuple):
    """The rank of an option, lowest first; fields are compared in order."""

    fallback: bool
    """Even for low-priority models, a fallback node is the last resort."""
    siblings: int
    """Replicas of the same model on the node, if they are to be spread."""
    siblings_on_devices: int
    """The same on its devices: one failing device would take them all down."""
    unlinked_pairs: int
    """Pairs of its devices without NVLink."""
    extra_numa_nodes: int
    """NUMA nodes of its devices, beyond the first."""
    whole_gpus: int
    """GPUs that are not slices."""
    gpus_opened: int
    """Idle GPUs that it would start to use: as few as possible."""
    left_bytes: int
    """Unneeded memory of its devices: best fit leaves the most to larger replicas."""
    parted_neighbours: int
    """Idle NVLink neighbours that lose a partner."""
    idle_gpus: int
    """Idle GPUs of the node: nodes with few go first, to keep those that a large group could use."""
    load: float
    """Replicas per core; negated if replicas are to be packed."""
    node: str
    devices: tuple[str, ...]


class Option(NamedTuple):
    """A way to place a replica."""

    rank: Rank
    spot: Spot


def options(node: Node, need: Need, taken: Taken) -> list[Option]:
    """The options for a replica on a node, best first; none: `obstacle` says why."""
    if unsuited(node, need) or _needed_bytes(node, need) > max(taken.free_bytes(node), 0):
        return []
    if runs_without_gpus(node, need):
        groups: Iterable[tuple[Device, ...]] = ((),)
    else:
        groups = _groups([d for d in node.devices if not _refusal(node, d, need, taken)], need)
    found = []
    for group in groups:
        cpus = _cores(node, group, need, taken)
        if cpus is not None:
            found.append(Option(_rank(node, group, need, taken), Spot(node.name, tuple(d.id for d in group), cpus)))
    return sorted(found)


def unsuited(node: Node, need: Need) -> str:
    """Why such a replica may not run on a node, ever or while it is barred; empty: it may."""
    if need.nodes and node.name not in need.nodes:
        return "is not one of its nodes"
    if not need.labels <= node.labels:
        return f"has no label {', '.join(sorted(need.labels - node.labels))}"
    if node.fallback and not need.low_priority:
        return "is reserved for low-priority models"
    return f"is {node.barred}" if node.barred else ""


def unsuited_spot(node: Node | None, need: Need, spot: Spot) -> str:
    """Why a running replica should leave its spot; empty: it may stay, whatever it uses."""
    if node is None:
        return f"node {spot.node} no longer exists"
    why = unsuited(node, need)
    if why:
        return f"{node.name} {why}"
    devices = {device.id: device for device in node.devices}
    if len(spot.devices) != (0 if runs_without_gpus(node, need) else need.gpus):
        return f"it has {len(spot.devices)} GPUs"
    for id in spot.devices:
        device = devices.get(id)
        why = f"no longer has the device {id}" if device is None else _unfit(device, need)
        if why:
            return f"{node.name} {why}" if device is None else f"{device.name} of {node.name} {why}"
    if len(spot.cpus) != need.cpus or not set(spot.cpus) <= set(node.cpus):
        return f"it has cores {spot.cpus}"
    return ""


def obstacle(node: Node, need: Need, taken: Taken) -> str:
    """Why a replica does not fit on a node, with the figures."""
    why = unsuited(node, need)
    if why:
        return why
    needed, free_bytes = _needed_bytes(node, need), max(taken.free_bytes(node), 0)
    if needed > free_bytes:
        return f"has {gib(free_bytes)} GiB of memory free of {gib(node.memory_bytes)}, {gib(needed)} needed"
    if not runs_without_gpus(node, need):
        refusals = [_refusal(node, device, need, taken) for device in node.devices]
        free = refusals.count("")
        if free < need.gpus:
            several = "1 GPU" if free == 1 else f"{free} GPUs"
            head = f"has {several} available, {need.gpus} needed" if need.gpus > 1 else ""
            each = [f"{d.name} {why}" for d, why in zip(node.devices, refusals, strict=True) if why]
            return "; ".join(filter(None, (head, *each))) or "has no GPU"
        if not any(
            True for _ in _groups([d for d, why in zip(node.devices, refusals, strict=True) if not why], need)
        ):
            return f"has no {need.gpus} free GPUs that are all connected by NVLink"
    return f"has {len(taken.free_cpus(node))} free cores of {len(node.cpus)}, {need.cpus} needed"


def _needed_bytes(node: Node, need: Need) -> int:
    """Memory needed on a node."""
    return need.fallback_bytes if need.gpus and node.fallback else need.memory_bytes


def _unfit(device: Device, need: Need) -> str:
    """Why a device is unsuitable or barred; empty: it is not."""
    if device.barred:
        return f"is {device.barred}"
    if need.kinds and device.kind not in need.kinds:
        return f"is not {' or '.join(sorted(need.kinds))}"
    if need.profile and device.profile != need.profile:
        return f"is {device.profile or 'a whole GPU'}, not {need.profile}"
    if need.gpus > 1 and device.profile:
        return "is a MIG slice, which cannot be combined with others"
    return ""


def _refusal(node: Node, device: Device, need: Need, taken: Taken) -> str:
    """Why a device cannot be used by a replica now; empty: it can."""
    why = _unfit(device, need)
    if why:
        return why
    if need.whole and taken.sharers[node.name, device.id]:
        return f"is taken by {taken.holders(node.name, device.id)}"
    needed = need.device_bytes if need.whole else device_need_bytes(device, need)
    free = taken.free_device_bytes(node, device)
    if needed <= free:
        return ""
    foreign = f" ({gib(device.foreign_bytes)} are used by other programs)" if device.foreign_bytes else ""
    return f"has {gib(max(free, 0))} GiB free of {gib(device.memory_bytes)}{foreign}, {gib(needed)} needed"


def _groups(devices: Sequence[Device], need: Need) -> Iterable[tuple[Device, ...]]:
    """Groups of devices that a replica could use."""
    if comb(len(devices), need.gpus) <= GROUPS_MAX:
        groups: Iterable[tuple[Device, ...]] = combinations(devices, need.gpus)
    else:
        groups = (_grown(first, devices, need.gpus) for first in devices)
    return (group for group in groups if not need.linked or not _unlinked_pairs(group))


def _grown(first: Device, devices: Sequence[Device], count: int) -> tuple[Device, ...]:
    """A group grown from one device by repeatedly adding the best connected one."""
    group = [first]
    while len(group) < count:
        rest = (device for device in devices if device not in group)
        group.append(
            min(rest, key=lambda d: (_unlinked_pairs((*group, d)), _extra_numa_nodes((*group, d)), devices.index(d)))
        )
    return tuple(sorted(group, key=devices.index))


def _unlinked_pairs(group: Sequence[Device]) -> int:
    return sum(a.id not in b.links and b.id not in a.links for a, b in combinations(group, 2))


def _extra_numa_nodes(group: Sequence[Device]) -> int:
    return max(len({device.numa for device in group} - {None}) - 1, 0)


def _rank(node: Node, group: Sequence[Device], need: Need, taken: Taken) -> Rank:
    own = {device.id for device in group}
    idle = [d for d in node.devices if not d.profile and not taken.sharers[node.name, d.id]]
    load = taken.replicas[node.name] / max(len(node.cpus), 1)
    return Rank(
        fallback=node.fallback,
        siblings=taken.models[node.name, need.model] if need.spread else 0,
        siblings_on_devices=sum(taken.siblings[node.name, id, need.model] for id in own) if need.spread else 0,
        unlinked_pairs=_unlinked_pairs(group),
        extra_numa_nodes=_extra_numa_nodes(group),
        whole_gpus=sum(not device.profile for device in group),
        gpus_opened=sum(device.id in own for device in idle),
        left_bytes=sum(_left_bytes(node, device, need, taken) for device in group),
        parted_neighbours=sum(bool(own & d.links) for d in idle if d.id not in own),
        idle_gpus=len(idle),
        load=load if need.spread else -load,
        node=node.name,
        devices=tuple(device.id for device in group),
    )


def _left_bytes(node: Node, device: Device, need: Need, taken: Taken) -> int:
    if need.whole:
        return device.memory_bytes - need.device_bytes + device.foreign_bytes
    return taken.free_device_bytes(node, device) - device_need_bytes(device, need)


def _cores(node: Node, group: Sequence[Device], need: Need, taken: Taken) -> tuple[int, ...] | None:
    """Cores to reserve for a replica, on one NUMA node if possible, preferably that of its devices."""
    if not need.cpus:
        return ()
    free = taken.free_cpus(node)
    near = {device.numa for device in group}
    parts = [(place not in near, tuple(cpu for cpu in cpus if cpu in free)) for place, cpus in enumerate(node.numa)]
    large = sorted((far, len(cpus), cpus) for far, cpus in parts if len(cpus) >= need.cpus)
    chosen = large[0][2] if large else free
    return tuple(islice(chosen, need.cpus)) if len(chosen) >= need.cpus else None
