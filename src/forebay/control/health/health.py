"""Health of nodes and their GPUs: polls them, keeps their state, and decides what may run where.

Nothing here waits for a round of control, and no round waits for it: a round reads the last known state.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from forebay.control.health.documents import NodeStanding, standing_of
from forebay.control.health.metering import Meters
from forebay.control.health.node_state import Maintenance, NodeState
from forebay.control.health.polling import TIMEOUT_S, Look, Watch, look_at_all
from forebay.core.health import (
    DeviceEvent,
    DeviceReading,
    DeviceState,
    Effect,
    Excluded,
    HealthRules,
    Remedy,
    devices_hit,
    inherited,
    lightest,
    release,
    standing,
    step,
)
from forebay.core.health import Health as State
from forebay.core.model import ModelRoutes
from forebay.core.placement.settings import NodeSettings
from forebay.core.reconcile import ObservedUnit, UnitKey
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics
from forebay.providers.devices.opening import LOCAL
from forebay.providers.devices.protocol import DeviceSource
from forebay.store.access import RunBlocking, StoreAccess
from forebay.store.database import StoreError
from forebay.store.documents import Changed, Documents

CONTROL: Final = "control"
SERVING: Final = frozenset({State.HEALTHY, State.DEGRADED})
"""A device changes between these often: such changes are logged, but not stored."""
BEGIN_TIMEOUT_S: Final = 3.0
"""Running units need control sooner than it needs to know of GPUs."""


class NodeRefused(Exception):  # noqa: N818 - an answer, not a mistake
    """A request for a node was rejected. `param`: what is wrong; `node` or `device` if it does not exist."""

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.param = param


class Health:
    """The state of every node and device. `sources` by node, that of this machine as `local`; `nodes`: those of the
    cluster file; `unplaceable`: a sentence for each slot on a node that would fit nowhere else."""

    def __init__(
        self,
        records: Documents,
        run: RunBlocking,
        sources: Mapping[str, DeviceSource],
        *,
        note: Callable[[str, str], None],
        metrics: Metrics,
        rules: HealthRules,
        poll_s: float,
        nodes: Callable[[], Sequence[NodeSettings]] = lambda: (),
        unplaceable: Callable[[str], tuple[str, ...]] | None = None,
    ) -> None:
        self._records = records
        self._use = StoreAccess(run, note, "nodes and devices are looked after in memory")
        self._watches = {node: Watch(source) for node, source in sorted(sources.items())}
        self._note = note
        self._meters = Meters(metrics)
        self._rules = rules
        self._poll_s = poll_s
        self._declared = nodes
        self.unplaceable = unplaceable
        self.silent: dict[str, str] = {}
        """Sources that cannot report everything now, and why."""
        self._blind: set[str] = set()
        """Those of them that cannot read any device."""
        self._nodes: dict[str, NodeState] = {}
        self._readings: dict[str, DeviceReading] = {}
        self._found: dict[str, tuple[str, ...]] = {}
        """Ids of devices by their source."""
        self._excluded = Excluded()
        self._condemned: dict[UnitKey, str] = {}
        self._units: tuple[ObservedUnit, ...] = ()
        self._is_read = False
        self._turn = asyncio.Lock()
        self._wake: Callable[[], None] = lambda: None

    @property
    def trouble(self) -> str:
        """Why the store is unavailable; empty: it is available."""
        return self._use.trouble

    @property
    def excluded(self) -> Excluded:
        """Where nothing may run."""
        return self._excluded

    @property
    def readings(self) -> Mapping[str, DeviceReading]:
        """The last reading of every device, by id, including those of nodes whose source is silent."""
        return self._readings

    def close(self) -> None:
        """Close the sources and the store."""
        for watch in self._watches.values():
            watch.close()
        self._records.close()

    async def begin(self) -> None:
        """Load the stored state; while the store is down only what is observed counts, and it is loaded later."""
        await self._read()
        await self.look(BEGIN_TIMEOUT_S)

    async def run(self, wake: Callable[[], None]) -> None:
        """Poll, and store changes, until cancelled. `wake` requests a round."""
        self._wake = wake
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.look()
            except Exception as mistake:  # supervisor: the known state stays, and is polled again
                self._note("trouble", f"health: {type(mistake).__name__}: {mistake}")

    async def look(self, timeout_s: float = TIMEOUT_S) -> None:
        """Poll all sources once, with that timeout for each."""
        if not self._is_read and self._use.is_due():
            await self._read()
        now = wall_s()
        for source, look in (await look_at_all(self._watches, timeout_s)).items():
            self._process(source, look, now)
        self._meters.sources(self._troubles())
        self._settle()
        await self._keep()

    def condemned(self, units: Iterable[ObservedUnit]) -> Mapping[UnitKey, str]:
        """Units lost by an error of their device, and why. `units` are all that run."""
        self._units = tuple(units)
        keys = {unit.key for unit in self._units if unit.alive}
        self._condemned = {key: why for key, why in self._condemned.items() if key in keys}
        return self._condemned

    def weighed(self, models: tuple[ModelRoutes, ...]) -> tuple[ModelRoutes, ...]:
        """The routes, with a lower weight for every replica whose devices are slow."""
        weights = self._weights()
        return tuple(_with_weights(model, weights) for model in models)

    def duty(self, model: str) -> float | None:
        """The mean duty cycle of the devices that a model's replicas run on, 0..1; None: unknown."""
        if not self._readings:
            return None
        own = {id for unit in self._units if unit.alive and _is_of(unit, model) for id in unit.devices}
        own.difference_update(*(self._found.get(source, ()) for source in self._blind))
        known = [r.duty for id in sorted(own) if (r := self._readings.get(id)) is not None and r.duty is not None]
        return sum(known) / len(known) if known else None

    def nodes(self) -> tuple[NodeStanding, ...]:
        """The state of every node, by name."""
        return tuple(self._standing(name) for name in self._names())

    async def drain(self, name: str, actor: str, why: str, *, force: bool = False) -> NodeStanding:
        """Drain a node. Raises `NodeRefused` if what runs there fits nowhere else."""
        node = self._node(name)
        unplaceable = () if force else self._unplaceable(name)
        if unplaceable:
            lines = "".join(f"\n  {each}" for each in unplaceable)
            raise NodeRefused(f"{name} is not drained, for this fits nowhere else:{lines}\n--force drains it anyway")
        now = wall_s()
        node.record, node.asked = replace(node.record, maintenance=Maintenance(now, actor, why)), True
        await self._apply_change(node, Changed("node.drained", now, actor, f"node/{name}", why), f"{name} is drained")
        return self._standing(name)

    async def undrain(self, name: str, actor: str, why: str, device: str = "") -> NodeStanding:
        """Put a node, or a device of it, back into service. Raises `NodeRefused`."""
        node, now = self._node(name), wall_s()
        if device:
            self._release(node, device, why or f"released by {actor}")
            subject, text = f"node/{name}/{device}", f"{device} of {name} may serve again"
        else:
            if node.record.maintenance is None and self._is_read:
                return self._standing(name)
            node.record, node.asked = replace(node.record, maintenance=None), True
            subject, text = f"node/{name}", f"{name} may serve again"
        await self._apply_change(node, Changed("node.undrained", now, actor, subject, why), text)
        return self._standing(name)

    def _names(self) -> list[str]:
        """Nodes that are declared, or of which there are readings; without either, this machine."""
        declared = {node.name for node in self._declared()} or {LOCAL}
        return sorted(declared | {reading.node for reading in self._readings.values()})

    def _node(self, name: str) -> NodeState:
        """A node that exists. Raises `NodeRefused`."""
        names = self._names()
        if name not in names:
            raise NodeRefused(f"there is no node {name}; there is: {', '.join(names)}", "node")
        return self._nodes.setdefault(name, NodeState(name))

    def _unplaceable(self, name: str) -> tuple[str, ...]:
        """A sentence for each slot on a node that would fit nowhere else."""
        out = self._excluded.nodes
        if set(self._names()) - {name, *out}:
            return self.unplaceable(name) if self.unplaceable is not None else ()
        left = [] if name in out else self._standing(name).replicas
        return tuple(f"{slot}: there is no other node that serves" for slot in left)

    def _release(self, node: NodeState, device: str, why: str) -> None:
        state = node.record.devices.get(device)
        if state is None:
            raise NodeRefused(f"{node.name} has no device {device}", "device")
        if not state.out:
            raise NodeRefused(f"{device} is {state.state}: it may serve")
        reading = self._readings.get(device)
        wrong = standing(reading) if reading is not None else ""
        if wrong:
            raise NodeRefused(f"{device} would be taken out again at once: {wrong}")
        node.put(release(state, wall_s(), why, self._rules))

    async def _apply_change(self, node: NodeState, changed: Changed, text: str) -> None:
        """An operator's change: it takes effect at once, even while the store is down."""
        node.changed.append(changed)
        why = f": {changed.why}" if changed.why else ""
        self._note(changed.kind, f"{text}{why} (by {changed.actor})")
        self._settle()
        await self._keep()

    def _standing(self, name: str) -> NodeStanding:
        node = self._nodes.get(name, NodeState(name))
        return standing_of(node.record, name, self._readings, self._units, self._troubles().get(name, ""))

    def _troubles(self) -> dict[str, str]:
        """Why the devices of a node cannot be read; empty: they can. A node without a source is missing."""
        found: dict[str, str] = {}
        for source in self._watches:
            nodes = {self._readings[id].node for id in self._found.get(source, ())} or {self._home(source)}
            for node in nodes:
                found[node] = found.get(node) or self.silent.get(source, "")
        return found

    def _home(self, source: str) -> str:
        """The node that a source's devices belong to unless something else is known."""
        return source if source != LOCAL else next((node.name for node in self._declared()), LOCAL)

    def _process(self, source: str, look: Look, now: float) -> None:
        """Process what a source reports of its devices."""
        self._note_source(source, look)
        if look.readings is not None:
            self._replace(source, look.readings)
        own = {id: self._readings[id] for id in self._found.get(source, ())}
        hits = self._hits(source, look.events, own)
        for id, reading in own.items():
            node = self._nodes.setdefault(reading.node, NodeState(reading.node))
            before = node.record.devices.get(id, DeviceState(id))
            state, effects = step(
                before, reading if look.readings is not None else None, hits.get(id, ()), now, self._rules
            )
            if state != before:
                node.put(state)
            for effect in effects:
                self._apply_effect(node, effect, now)
            self._meters.device(reading, state)

    def _replace(self, source: str, readings: Iterable[DeviceReading]) -> None:
        """Replace the devices of a source by its new readings."""
        whole = {each.device: each for each in readings}
        owners = {gpu.id: node.name for node in self._declared() for gpu in node.gpus or ()}
        home = self._home(source)
        own = {}
        for id, each in sorted(whole.items()):
            reading = inherited(each, whole)
            own[id] = replace(reading, node=each.node or owners.get(each.parent or id, home))
        for gone in sorted(set(self._found.get(source, ())) - own.keys()):
            self._meters.forget(self._readings.pop(gone))
        self._found[source] = tuple(own)
        self._readings.update(own)

    def _hits(
        self, source: str, events: Iterable[DeviceEvent], here: Mapping[str, DeviceReading]
    ) -> dict[str, list[DeviceEvent]]:
        """Errors by the local devices that they affect."""
        hits: dict[str, list[DeviceEvent]] = {}
        for event in events:
            devices = devices_hit(event.device, here.values())
            if not devices:
                self._note("device_unknown", f"XID {event.xid} of {event.device}, which is no device of {source}")
            for id in devices:
                hits.setdefault(id, []).append(event)
        return hits

    def _apply_effect(self, node: NodeState, effect: Effect, now: float) -> None:
        """Act on the effect of a step, and report it."""
        moved = effect.after is not effect.before
        kind = f"device.{effect.after}" if moved else f"device.{effect.remedy.name.lower()}"
        self._note(kind, f"{effect.device} of {node.name}: {effect.why or effect.after}")
        if effect.remedy is not Remedy.IGNORE or effect.xid:
            self._meters.error(node.name, effect.device, effect.remedy)
        if effect.lost:
            for unit in self._units:
                if unit.alive and effect.device in unit.devices:
                    self._condemned[unit.key] = f"its device {effect.device}: {effect.why}"
        if moved and not {effect.before, effect.after} <= SERVING:
            document = {"before": effect.before, "after": effect.after, "xid": effect.xid, "node": node.name}
            subject = f"node/{node.name}/{effect.device}"
            node.changed.append(Changed(kind, now, CONTROL, subject, effect.why, document))

    def _note_source(self, source: str, look: Look) -> None:
        trouble = look.trouble
        (self._blind.add if look.readings is None else self._blind.discard)(source)
        before = self.silent.pop(source, "")
        if trouble:
            self.silent[source] = trouble
        if trouble != before:
            lacks = "errors are not heard" if look.readings is not None else "nothing is known, so nothing changes"
            told = f"of the devices of {source} {lacks}: {trouble}"
            self._note("devices_unknown", told if trouble else f"the devices of {source} can be read again")

    def _settle(self) -> None:
        """Determine what is excluded; request a round if that has changed, or units were hit."""
        nodes, devices = {}, {}
        for name, node in sorted(self._nodes.items()):
            if node.record.maintenance is not None:
                nodes[name] = node.record.maintenance.text
            devices.update({id: f"{s.state}: {s.why}" for id, s in node.record.devices.items() if s.out})
        for id, reading in self._readings.items():
            if reading.parent in devices:
                devices.setdefault(id, devices[reading.parent])
        self._meters.nodes(self._nodes)
        excluded = Excluded(nodes, devices)
        changed = excluded != self._excluded or bool(self._condemned)
        self._excluded = excluded
        if changed:
            self._wake()

    def _weights(self) -> dict[UnitKey, float]:
        slow = {
            id: state.weight
            for node in self._nodes.values()
            for id, state in node.record.devices.items()
            if state.weight < 1.0
        }
        if not slow:
            return {}
        found = {unit.key: lightest([slow[id] for id in unit.devices if id in slow]) for unit in self._units}
        return {key: weight for key, weight in found.items() if weight < 1.0}

    async def _read(self) -> None:
        """Load the stored state, once."""
        try:
            stored = await self._use(self._records.known)
        except StoreError:
            return
        self._is_read = True
        for name, kept in stored.items():
            problem = self._nodes.setdefault(name, NodeState(name)).take(kept)
            if problem:
                self._note("store_trouble", problem)
        self._settle()

    async def _keep(self) -> None:
        """Store what has changed; if that fails, it is retried later."""
        if not self._is_read or not self._use.is_due():
            return
        async with self._turn:
            for node in [node for _, node in sorted(self._nodes.items()) if node.changed]:
                with suppress(StoreError):
                    await self._store(node)

    async def _store(self, node: NodeState) -> None:
        changed = tuple(node.changed)
        stored, is_ours = await self._use.keep(self._records, node.name, node.kept, changed[-1].at, changed)
        node.version = stored.version
        if is_ours:
            del node.changed[: len(changed)]


def _is_of(unit: ObservedUnit, model: str) -> bool:
    return unit.slot.rpartition("-")[0] == model


def _with_weights(model: ModelRoutes, weights: Mapping[UnitKey, float]) -> ModelRoutes:
    replicas = tuple(
        r if (own := weights.get((r.id, r.generation), 1.0)) == r.weight else replace(r, weight=own)
        for r in model.replicas
    )
    return model if replicas == model.replicas else replace(model, replicas=replicas)
