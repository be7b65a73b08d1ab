"""Formats nodes: state, devices, and what runs there."""

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.cli.deploy.view import time
from forebay.cli.view.table import table
from forebay.control.api.documents import NodeDocuments
from forebay.control.health.documents import DeviceStanding, NodeStanding
from forebay.control.placing.rows import PlacedDevice, PlacedNode

NODES = {"serving": "green", "draining": "yellow", "drained": "yellow"}
DEVICES = {
    "healthy": "green",
    "degraded": "yellow",
    "draining": "bold yellow",
    "quarantined": "bold red",
    "recovering": "cyan",
}
GIB = 1024**3
RIGHT = ("memory", "busy", "heat", "power", "clock", "weight")


def blocks(found: NodeDocuments) -> RenderableType:
    """Several nodes, one below the other, and replicas that fit on none of them."""
    placed = {each.name: each for each in found.placed}
    parts = [part for each in found.nodes for part in (Text(), block(each, placed.get(each.name)))]
    waits = [Text(f"{slot} waits: {why}", "bold yellow") for slot, why in found.waits.items()]
    return Group(*parts[1:], *([Text(), *waits] if waits else ()))


def remains(node: NodeStanding, found: NodeDocuments) -> str:
    """What still runs on a draining node, and why it cannot move, as far as known."""
    placed = next((each for each in found.placed if each.name == node.name), None)
    whys = {replica.slot: replica.why for replica in placed.replicas if replica.why} if placed else {}
    lines = [f"  {slot}: {whys[slot]}" for slot in node.replicas if slot in whys]
    return "\n".join([f"{', '.join(node.replicas)} still running", *lines]) if node.replicas else ""


def block(node: NodeStanding, placed: PlacedNode | None = None) -> RenderableType:
    """All details of a node."""
    return Group(*_lines(node, placed))


def _lines(node: NodeStanding, placed: PlacedNode | None) -> Iterator[RenderableType]:
    yield Text.assemble((node.name, "bold"), "  ", (node.state, NODES.get(node.state, "")))
    if node.since:
        why = f": {node.why}" if node.why else ""
        yield _indented(Text(f"by {node.by}, {time(node.since)} UTC{why}", "dim"))
    if node.trouble:
        yield _indented(Text(f"its devices cannot be read: {node.trouble}", "yellow"))
    if placed is not None:
        yield _indented(Text(_room(placed)))
    yield _indented(Text(f"replicas: {', '.join(node.replicas) or 'none'}"))
    for replica in placed.replicas if placed else ():
        if replica.why:
            yield _indented(Text(f"{replica.slot} should be elsewhere: {replica.why}", "yellow"))
    unread = _unread(node, placed)
    if node.devices or unread:
        shown = _devices(node.devices)
        for declared, replicas in unread:
            memory = f"?/{_gib(declared.memory_bytes)} GiB"
            shown.add_row(
                declared.id, "no readings", declared.profile or declared.kind, memory, *"?????", replicas or "-"
            )
        yield _indented(shown)
        for device in node.devices:
            if device.why and device.state != "healthy":
                yield _indented(Text(f"{device.device}: {_reason(node.name, device)}", DEVICES.get(device.state, "")))


def _unread(node: NodeStanding, placed: PlacedNode | None) -> list[tuple[PlacedDevice, str]]:
    """The GPUs of the cluster file that no source has read, with the replicas on each."""
    if placed is None:
        return []
    read = {device.device for device in node.devices}
    return [
        (device, ", ".join(replica.slot for replica in placed.replicas if device.id in replica.devices))
        for device in placed.devices
        if device.id not in read
    ]


def _room(placed: PlacedNode) -> str:
    """Memory and cores allocated on a node."""
    used = sum(replica.memory_used_bytes for replica in placed.replicas)
    words = [f"memory: {_gib(placed.memory_taken_bytes)} of {_gib(placed.memory_bytes)} GiB taken, {_gib(used)} used"]
    words += [f"cores: {len(placed.cpus)}"] if placed.cpus else []
    words += ["only for low-priority models"] if placed.fallback else []
    return "; ".join([*words, *placed.labels])


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))


def _devices(devices: Iterable[DeviceStanding]) -> Table:
    shown = table(
        "device", "state", "name", "memory", "busy", "heat", "power", "clock", "weight", "replicas",
        right=RIGHT,
    )  # fmt: skip
    for it in devices:
        shown.add_row(
            f"  {it.device}" if it.parent else it.device,
            Text("lost" if it.lost else it.state, "bold red" if it.lost else DEVICES.get(it.state, "")),
            it.profile or it.name,
            f"{_gib(it.memory_used_bytes)}/{_gib(it.memory_bytes)} GiB",
            "?" if it.duty is None else f"{it.duty:.0%}",
            "?" if it.temperature_c is None else f"{it.temperature_c:.0f} °C",
            "?" if it.power_w is None else f"{it.power_w:.0f} W",
            _clock(it),
            f"{it.weight:.2f}",
            ", ".join(it.replicas) or "-",
        )
    return shown


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / GIB:.1f}"


def _clock(it: DeviceStanding) -> str:
    if it.clock_mhz is None:
        return "?"
    by = f" ({', '.join(it.throttles)})" if it.throttles else ""
    return f"{it.clock_mhz:.0f} MHz{by}"


def _reason(node: str, it: DeviceStanding) -> str:
    undrain = f"`forebay undrain {node} --device {it.device}`"
    match it.state:
        case "draining":
            return f"{it.why}; returns to service at {time(it.calm_at)} UTC unless there is another error"
        case "recovering":
            return f"{it.why}; on probation until {time(it.calm_at)} UTC"
        case "quarantined" if it.remedy == "reset":
            return f"{it.why}; serves again after a reset of the GPU or its machine, or after {undrain}"
        case "quarantined":
            return f"{it.why}; serves again after {undrain}"
        case _:
            return it.why
