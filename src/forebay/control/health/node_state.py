"""The state of a node, in memory and in the store."""

from dataclasses import dataclass, field, replace

import msgspec

from forebay.core.health import DeviceState
from forebay.store.documents import Changed, Kept
from forebay.wire.documents import UNREADABLE


@dataclass(frozen=True, slots=True)
class Maintenance:
    """An operator has drained a node. `since` is wall time."""

    since: float
    by: str
    why: str = ""

    @property
    def text(self) -> str:
        """As text for people."""
        return f"drained by {self.by}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The stored document of a node."""

    maintenance: Maintenance | None = None
    devices: dict[str, DeviceState] = field(default_factory=dict)


@dataclass
class NodeState:
    """A node: its state, the stored version of it, and changes since."""

    name: str
    record: NodeRecord = field(default_factory=NodeRecord)
    version: int = 0
    changed: list[Changed] = field(default_factory=list)
    asked: bool = False
    """An operator has drained or undrained it since control started: the stored state is older."""

    @property
    def kept(self) -> Kept:
        """The document to be stored."""
        return Kept(msgspec.json.encode(self.record).decode(), self.version)

    def take(self, kept: Kept) -> str:
        """Merge the stored state; newer changes take precedence. Returns what is wrong; empty: nothing."""
        self.version = kept.version
        try:
            old = msgspec.json.decode(kept.text, type=NodeRecord)
        except UNREADABLE as error:
            return f"what was stored of node {self.name} cannot be read: {error}"
        now = self.record
        devices = {id: state for id, state in now.devices.items() if state.since}
        merged = {**now.devices, **old.devices, **devices}
        maintenance = now.maintenance if self.asked else old.maintenance
        self.record = NodeRecord(maintenance, dict(sorted(merged.items())))
        return ""

    def put(self, state: DeviceState) -> None:
        """Set the state of a device."""
        self.record = replace(self.record, devices={**self.record.devices, state.device: state})
