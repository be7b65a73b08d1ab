"""Faults of a simulated cluster. A fault starts and returns its undo function, or None if it is momentary."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final, Protocol

from forebay.core.reconcile import Kind
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.machine import Machine, Process
from forebay.sim.full.replica import Health
from forebay.sim.network.links import Shape
from forebay.sim.network.network import Network

Undo = Callable[[], None]
WALL_STEP_S_MAX: Final = 7200.0
OLD_SNAPSHOTS_MAX: Final = 8


class Field(Protocol):
    """What faults act on."""

    network: Network
    machine: Machine
    event_log: EventLog
    clients: tuple[str, ...]
    wall_ahead_s: float

    @property
    def control_node(self) -> str:
        """The node of control."""

    @property
    def snapshot(self) -> Path:
        """The snapshot file."""

    def health(self, slot: str) -> Health:
        """The health of the replicas in a slot, which outlives each of them."""

    def kill_control(self) -> Undo:
        """Kill control until this is undone."""

    def upgrade(self, kind: Kind) -> None:
        """Require replacement of all units of a kind."""

    def change_snapshot(self, data: bytes) -> None:
        """Another process overwrites the snapshot file."""

    @property
    def snapshots(self) -> list[bytes]:
        """Earlier snapshots."""


Fault = Callable[[Field, Random], Undo | None]


def _units(field: Field, kind: Kind) -> list[Process]:
    return [process for process in field.machine.alive if process.slot.kind is kind]


def _slots(field: Field) -> list[str]:
    return sorted({each.slot.id for each in field.machine.processes.values() if each.slot.kind is Kind.REPLICA})


def _kill(kind: Kind) -> Fault:
    def fault(field: Field, rng: Random) -> None:
        units = _units(field, kind)
        if units:
            field.machine.kill(rng.choice(units))

    return fault


def _ask(kind: Kind) -> Fault:
    def fault(field: Field, rng: Random) -> None:
        units = _units(field, kind)
        if units:
            field.machine.ask(rng.choice(units))

    return fault


def _host_lost(field: Field, rng: Random) -> Undo | None:
    """A host vanishes silently: its connections stay half open."""
    units = _units(field, Kind.REPLICA)
    if not units:
        return None
    unit = rng.choice(units)
    field.network.vanish(unit.node)
    field.machine.kill(unit, "is gone with its host")
    return lambda: field.network.come_back(unit.node)


def _engine_dies(field: Field, rng: Random) -> None:
    slots = _slots(field)
    engine = field.health(rng.choice(slots)).engine if slots else None
    if engine is not None and engine.child is not None:
        engine.child.die()


def _ill(attribute: str, draw: Callable[[Random], object]) -> Fault:
    def fault(field: Field, rng: Random) -> Undo | None:
        slots = _slots(field)
        if not slots:
            return None
        health = field.health(rng.choice(slots))
        field.event_log.note("health", attribute)
        setattr(health, attribute, draw(rng))

        def undo() -> None:
            setattr(health, attribute, getattr(Health(), attribute))
            if health.engine is not None and health.engine.child is not None:
                health.engine.child.wake()

        return undo

    return fault


def _machine(attribute: str, why: str) -> Fault:
    def fault(field: Field, rng: Random) -> Undo:
        setattr(field.machine, attribute, why)
        return lambda: setattr(field.machine, attribute, "")

    return fault


def _upgrade(kind: Kind) -> Fault:
    def fault(field: Field, rng: Random) -> None:
        field.upgrade(kind)

    return fault


def _pair(field: Field, rng: Random) -> tuple[str, str] | None:
    """Two nodes that communicate; if one is a client, it may notice."""
    gateways = [each.node for each in _units(field, Kind.GATEWAY)]
    replicas = [each.node for each in _units(field, Kind.REPLICA)]
    ends = rng.choice(((field.clients, gateways), (gateways, replicas), (gateways, replicas), (gateways, replicas),
                       ([field.control_node], [*gateways, *replicas])))  # fmt: skip
    if not all(ends):
        return None
    a, b = rng.choice(ends[0]), rng.choice(ends[1])
    if a in field.clients:
        field.event_log.disturb(a, "its network")
    return a, b


def _slow_network(field: Field, rng: Random) -> Undo | None:
    pair = _pair(field, rng)
    if pair is None:
        return None
    field.network.shape(*pair, Shape(rng.uniform(0.0, 0.5), rng.uniform(0.0, 1.0), rng.choice((1e3, 1e5, 1e9))))

    def undo() -> None:
        if pair[0] in field.clients:  # until now it may have been notified late of closed connections
            field.event_log.disturb(pair[0], "its network is quick again")
        field.network.quicken(*pair)

    return undo


def _partition(field: Field, rng: Random) -> Undo | None:
    pair = _pair(field, rng)
    if pair is None:
        return None
    both, ends = rng.random() < 0.5, pair if rng.random() < 0.5 else pair[::-1]
    field.network.cut(*ends, both=both)

    def undo() -> None:
        if ends[0] in field.clients or ends[1] in field.clients:
            field.event_log.disturb(ends[0] if ends[0] in field.clients else ends[1], "its network is back")
        field.network.mend(*ends, both=both)

    return undo


def _reset(field: Field, rng: Random) -> None:
    pair = _pair(field, rng)
    if pair is None:
        return
    field.network.reset(*pair, both=rng.random() < 0.7)  # the requester notices: the simulated TCP never times out


def _control_dies(field: Field, rng: Random) -> Undo:
    return field.kill_control()


def _bad_snapshot(field: Field, rng: Random) -> None:
    """The file is damaged or replaced with an old one; processes that start meanwhile have to cope."""
    try:
        now = field.snapshot.read_bytes()
    except FileNotFoundError:
        return
    field.change_snapshot(rng.choice((b"", b"\0" * 100, now[: len(now) // 2], *field.snapshots[-OLD_SNAPSHOTS_MAX:])))


def _wall_steps(field: Field, rng: Random) -> None:
    field.wall_ahead_s += rng.uniform(-WALL_STEP_S_MAX, WALL_STEP_S_MAX)


FAULTS: Final[dict[str, Fault]] = {
    "replica-dies": _kill(Kind.REPLICA),
    "replica-stops": _ask(Kind.REPLICA),
    "host-lost": _host_lost,
    "engine-dies": _engine_dies,
    "engine-hangs": _ill("hung", lambda rng: True),
    "engine-slow": _ill("slow", lambda rng: rng.uniform(3.0, 20.0)),
    "garbage": _ill("garbage", lambda rng: "all"),
    "bad-answers": _ill("garbage", lambda rng: "work"),
    "slow-start": _ill("load_s", lambda rng: rng.uniform(2.0, 8.0)),
    "slow-to-listen": _ill("listen_s", lambda rng: rng.uniform(1.0, 6.0)),
    "failing-start": _ill("breaks", lambda rng: "out of memory"),
    "start-refused": _machine("refuses", "no room"),
    "nobody-knows": _machine("unreachable", "no answer"),
    "gateway-dies": _kill(Kind.GATEWAY),
    "gateway-stops": _ask(Kind.GATEWAY),
    "control-dies": _control_dies,
    "upgrade": _upgrade(Kind.REPLICA),
    "upgrade-gateways": _upgrade(Kind.GATEWAY),
    "slow-network": _slow_network,
    "partition": _partition,
    "reset": _reset,
    "bad-snapshot": _bad_snapshot,
    "wall-steps": _wall_steps,
}
"""By name, in the order in which a seed draws them."""
