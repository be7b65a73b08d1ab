"""The state of nodes as documents: the response of `/v1/nodes`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forebay.control.health.node_state import NodeRecord
from forebay.core.health import DeviceReading, DeviceState, Health
from forebay.core.reconcile import Kind, ObservedUnit
from forebay.providers.devices.opening import LOCAL


@dataclass(frozen=True, slots=True)
class DeviceStanding:
    """A GPU or a slice. `since`, `calm_at`: wall time. Null: unknown."""

    device: str
    index: int
    name: str
    parent: str
    profile: str
    state: str
    why: str
    since: float
    remedy: str
    """The remedy required by the error that took it out of service; `ignore`: none."""
    calm_at: float
    """When its rest or probation ends if nothing happens; 0: it has none."""
    weight: float
    lost: bool
    memory_bytes: int | None
    memory_used_bytes: int | None
    duty: float | None
    temperature_c: float | None
    power_w: float | None
    clock_mhz: float | None
    clock_max_mhz: float | None
    throttles: tuple[str, ...] | None
    ecc_errors: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    replicas: tuple[str, ...]
    """Slots that run there."""


@dataclass(frozen=True, slots=True)
class NodeStanding:
    """A node. `state`: `serving`, `draining` while something still runs there, `drained`."""

    name: str
    state: str
    why: str
    by: str
    since: float
    """When it was drained; 0: it is not."""
    trouble: str
    """Why its devices are unknown; empty: they can be read, or there is no source."""
    replicas: tuple[str, ...]
    """Slots that run there."""
    devices: tuple[DeviceStanding, ...]


def standing_of(
    record: NodeRecord,
    name: str,
    readings: Mapping[str, DeviceReading],
    units: Iterable[ObservedUnit],
    trouble: str,
) -> NodeStanding:
    """A node as it is now; `readings` and `units` are those of all nodes."""
    own = [unit for unit in units if unit.alive and unit.kind is Kind.REPLICA and (unit.node or LOCAL) == name]
    replicas = tuple(sorted(unit.slot for unit in own))
    out = record.maintenance
    there = {id: reading for id, reading in readings.items() if reading.node == name}
    known = sorted({*there, *(id for id, state in record.devices.items() if state.out)})
    return NodeStanding(
        name=name,
        state="serving" if out is None else "draining" if replicas else "drained",
        why=out.why if out else "",
        by=out.by if out else "",
        since=out.since if out else 0.0,
        trouble=trouble,
        replicas=replicas,
        devices=tuple(
            _device(there.get(id, DeviceReading(id)), record.devices.get(id, DeviceState(id)), own) for id in known
        ),
    )


def _device(reading: DeviceReading, state: DeviceState, units: Iterable[ObservedUnit]) -> DeviceStanding:
    return DeviceStanding(
        device=reading.device,
        index=reading.index,
        name=reading.name,
        parent=reading.parent,
        profile=reading.profile,
        state=state.state.value,
        why=state.why,
        since=state.since,
        remedy=state.remedy.name.lower(),
        calm_at=state.calm_at if state.state in (Health.DRAINING, Health.RECOVERING) else 0.0,
        weight=state.weight,
        lost=reading.lost,
        memory_bytes=reading.memory_bytes,
        memory_used_bytes=reading.memory_used_bytes,
        duty=reading.duty,
        temperature_c=reading.temperature_c,
        power_w=reading.power_w,
        clock_mhz=reading.clock_mhz,
        clock_max_mhz=reading.clock_max_mhz,
        throttles=None if reading.throttles is None else tuple(each.value for each in reading.throttles),
        ecc_errors=reading.ecc_errors,
        remap_pending=reading.remap_pending,
        remap_failed=reading.remap_failed,
        replicas=tuple(sorted(unit.slot for unit in units if reading.device in unit.devices)),
    )
