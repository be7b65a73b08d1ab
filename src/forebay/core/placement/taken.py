"""The resources of nodes that are claimed, with claims that are added and removed."""

from collections import Counter
from collections.abc import Iterable

from forebay.core.placement.values import Claim, Device, Need, Node, Spot


class Taken:
    """The sums of all claims on nodes and devices. Unknown keys count 0."""

    __slots__ = ("_claims", "cpus", "device_bytes", "memory_bytes", "models", "replicas", "sharers", "siblings")

    def __init__(self, claims: Iterable[Claim] = ()) -> None:
        self.memory_bytes: Counter[str] = Counter()
        self.device_bytes: Counter[tuple[str, str]] = Counter()
        self.sharers: Counter[tuple[str, str]] = Counter()
        """Replicas by node and device."""
        self.cpus: Counter[tuple[str, int]] = Counter()
        self.models: Counter[tuple[str, str]] = Counter()
        """Replicas by node and model, not counting leaving ones."""
        self.siblings: Counter[tuple[str, str, str]] = Counter()
        """The same by node, device and model."""
        self.replicas: Counter[str] = Counter()
        self._claims: dict[int, Claim] = {}
        for claim in claims:
            self.add(claim)

    def add(self, claim: Claim) -> None:
        """Add a claim."""
        self._claims[id(claim)] = claim
        self._count(claim, 1)

    def drop(self, claim: Claim) -> None:
        """Remove a claim (by identity)."""
        del self._claims[id(claim)]
        self._count(claim, -1)

    def _count(self, claim: Claim, sign: int) -> None:
        node = claim.spot.node
        self.memory_bytes[node] += sign * claim.memory_bytes
        self.replicas[node] += sign
        if not claim.leaves:
            self.models[node, claim.model] += sign
        for device, size in zip(claim.spot.devices, claim.device_bytes, strict=True):
            self.device_bytes[node, device] += sign * size
            self.sharers[node, device] += sign
            self.siblings[node, device, claim.model] += sign * (not claim.leaves)
        for cpu in claim.spot.cpus:
            self.cpus[node, cpu] += sign

    def free_bytes(self, node: Node) -> int:
        """Free memory of a node; negative if it is overcommitted."""
        return node.memory_bytes - self.memory_bytes[node.name]

    def free_device_bytes(self, node: Node, device: Device) -> int:
        """Free memory of a device."""
        return device.memory_bytes - device.foreign_bytes - self.device_bytes[node.name, device.id]

    def free_cpus(self, node: Node) -> tuple[int, ...]:
        """Cores that no replica has reserved."""
        return tuple(cpu for cpu in node.cpus if not self.cpus[node.name, cpu])

    def holders(self, node: str, device: str) -> str:
        """The slots of the replicas on a device, for display."""
        at = [c for c in self._claims.values() if c.spot.node == node and device in c.spot.devices]
        return ", ".join(sorted({f"{c.slot} (leaving)" if c.leaves else c.slot for c in at}))


def runs_without_gpus(node: Node, need: Need) -> bool:
    """Whether a replica would use no GPUs on this node."""
    return not need.gpus or node.fallback


def device_need_bytes(device: Device, need: Need) -> int:
    """Memory that a replica claims on such a device."""
    if need.whole:
        return device.memory_bytes
    return round(device.memory_bytes * need.fraction) if need.fraction else need.device_bytes


def claim_of(need: Need, node: Node, spot: Spot, leaves: bool = False) -> Claim:
    """The claim of a replica on a spot; a device that no longer exists counts 0."""
    devices = {device.id: device for device in node.devices}
    sizes = tuple(device_need_bytes(devices[id], need) if id in devices else 0 for id in spot.devices)
    memory_bytes = need.fallback_bytes if need.gpus and not spot.devices else need.memory_bytes
    return Claim(need.slot, need.model, spot, memory_bytes, sizes, leaves)
