"""Placement of a plan's slots: each gets a node, devices and cores, or the reason why there are none for it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from forebay.control.placing.measuring import Footprints
from forebay.control.placing.needs import Estimate, Needs
from forebay.control.placing.nodes import USUAL, make_nodes, with_foreign
from forebay.control.placing.rows import PlacedNode, make_rows
from forebay.control.plan import Plan, PlannedModel
from forebay.core.health.values import NOTHING_EXCLUDED, DeviceReading, Excluded
from forebay.core.model import WorkerSpec
from forebay.core.placement.place import place, unplaceable
from forebay.core.placement.settings import LOCAL, NodeSettings, cpu_list
from forebay.core.placement.taken import claim_of
from forebay.core.placement.values import Claim, Need, Node, Placement, Spot
from forebay.core.reconcile import Kind, ObservedUnit, Slot, State, UnitKey
from forebay.core.revision import placed_digest
from forebay.providers.machine import Machine

Wanted = list[tuple[PlannedModel, Slot, Need]]


class Placer:
    """Keeps its result as long as nothing has changed. `excluded` and `readings` are called every round."""

    def __init__(
        self,
        machine: Machine,
        estimate: Estimate,
        excluded: Callable[[], Excluded] = lambda: NOTHING_EXCLUDED,
        readings: Callable[[], Mapping[str, DeviceReading]] = dict,
        note: Callable[[str, str], None] = lambda kind, text: None,
    ) -> None:
        self._machine = machine
        self._needs = Needs(estimate)
        self._excluded = excluded
        self._readings = readings
        self._found: tuple[tuple[object, ...], Placement] | None = None
        self._made: dict[str, tuple[tuple[object, ...], Slot]] = {}
        self._units: dict[UnitKey, Claim] = {}
        self.footprints = Footprints(note)
        """The memory that replicas actually use."""
        self.nodes: tuple[Node, ...] = ()
        """As of the last round."""
        self.needs: dict[str, Need] = {}
        """By slot, of all that were wanted in the last round."""
        self.placement = Placement()
        """The placement of these."""

    def placed(self, plan: Plan, units: Iterable[ObservedUnit], state: State) -> Plan:
        """The plan with every slot placed that can be. A spare that cannot be placed is left out.

        Running replicas stay, unless their node or device is excluded, or the cluster file now requires another
        place.
        """
        alive = {unit.key: unit for unit in units if unit.alive and unit.kind is Kind.REPLICA}
        leaving = {(s.id, left.generation) for s in state.slots for left in s.leaving}
        running = {unit.slot: unit for key, unit in sorted(alive.items()) if key not in leaving}
        wanted = self._wanted(plan, running)
        needs = {slot.id: need for _, slot, need in wanted}
        spares = {model.spare.id for model in plan.models if model.spare}
        readings = self._readings()
        nodes = make_nodes(plan.nodes, self._machine, readings, self._excluded())
        self._units = _claims(nodes, alive, running, needs, self.footprints.used)
        self.nodes = with_foreign(nodes, readings, self._units.values())
        self.needs = {slot: need for slot, need in needs.items() if slot not in spares}
        self.placement = self._place(self.needs.values(), [needs[slot] for slot in sorted(spares & needs.keys())])
        settings = {each.name: each for each in plan.nodes or USUAL}
        slots = {slot.id: self._slot(slot, need, settings, running.get(slot.id)) for _, slot, need in wanted}
        self._needs.keep(needs.keys())
        for gone in self._made.keys() - slots.keys():
            del self._made[gone]
        return replace(plan, models=tuple(_with(model, slots) for model in plan.models))

    def without(self, node: str) -> tuple[str, ...]:
        """A sentence for each slot that runs on a node and would fit nowhere else now."""
        found = unplaceable(self.nodes, list(self._units.values()), list(self.needs.values()), node)
        return tuple(f"{slot} {why}" for slot, why in sorted(found.items()))

    def rows(self) -> tuple[PlacedNode, ...]:
        """The nodes with their used resources."""
        return make_rows(self.nodes, self._units, self.placement, self.footprints.used)

    def note(self, slot: str) -> str:
        """Why a slot has no place, or should have another; empty: neither."""
        return self.placement.waits.get(slot, "") or self.placement.stays.get(slot, "")

    def _wanted(self, plan: Plan, running: Mapping[str, ObservedUnit]) -> Wanted:
        """The slots that can be placed, with their needs. A slot that merely repeats a running unit stays as it
        is."""
        return [
            (model, slot, self._needs.of(model, slot))
            for model in plan.models
            for slot in (*model.units, *((model.spare,) if model.spare else ()))
            if slot.id not in running or running[slot.id].digest != slot.digest
        ]

    def _place(self, needs: Iterable[Need], spares: list[Need]) -> Placement:
        """Place the wanted slots first, then the spares in the remaining room."""
        wanted, claims = list(needs), list(self._units.values())
        key = (self.nodes, claims, wanted, spares)
        if self._found is None or self._found[0] != key:
            first = place(self.nodes, claims, wanted)
            at = {claim.slot: claim.spot for claim in claims if not claim.leaves}
            nodes = {node.name: node for node in self.nodes}
            new = [
                claim_of(need, nodes[spot.node], spot)
                for need in wanted
                if (spot := first.spots.get(need.slot)) and spot != at.get(need.slot)
            ]
            second = place(self.nodes, (*claims, *new), spares, steps_max=0)
            self._found = key, _both(first, second)
        return self._found[1]

    def _slot(self, slot: Slot, need: Need, settings: Mapping[str, NodeSettings], unit: ObservedUnit | None) -> Slot:
        """A slot in its place; the same object as long as nothing changes."""
        spot = self.placement.spots.get(slot.id)
        where: Spot | str = self.placement.waits[slot.id] if spot is None else spot
        node = settings.get(spot.node) if spot else None
        if unit is not None and spot is not None and node is None:
            return replace(slot, digest=unit.digest)  # its node is no longer declared, and no other fits
        moves = self.placement.moves.get(slot.id, "")
        key = (slot, need, where, node, moves)
        made = self._made.get(slot.id)
        if made is None or made[0] != key:
            placed = _in_place(slot, need, where, node, self.nodes)
            made = self._made[slot.id] = key, replace(placed, moves=f"moves: {moves}" if moves else "")
        return made[1]


def _both(first: Placement, second: Placement) -> Placement:
    return Placement(
        {**first.spots, **second.spots},
        {**first.waits, **second.waits},
        {**first.moves, **second.moves},
        {**first.stays, **second.stays},
    )


def _claims(
    nodes: Iterable[Node],
    alive: Mapping[UnitKey, ObservedUnit],
    running: Mapping[str, ObservedUnit],
    needs: Mapping[str, Need],
    used: Mapping[UnitKey, int],
) -> dict[UnitKey, Claim]:
    """The resources of all units: their claims, or their measured use if higher; leaving units hold theirs until they
    end."""
    known = {node.name: node for node in nodes}
    claims = {}
    for key, unit in sorted(alive.items()):
        need, name, leaves = needs.get(unit.slot), unit.node or LOCAL, running.get(unit.slot) is not unit
        if need is not None and name in known:
            claim = claim_of(need, known[name], Spot(name, unit.devices, unit.cpus if need.cpus else ()), leaves)
        else:
            sizes = (unit.device_bytes,) * len(unit.devices)
            model, spot = unit.slot.rpartition("-")[0], Spot(name, unit.devices, ())
            claim = Claim(unit.slot, model, spot, unit.memory_bytes, sizes, leaves)
        more = used.get(key, 0) > claim.memory_bytes
        claims[key] = replace(claim, memory_bytes=used[key]) if more else claim
    return claims


def _with(model: PlannedModel, slots: Mapping[str, Slot]) -> PlannedModel:
    """A model with its slots placed."""
    spare = slots.get(model.spare.id, model.spare) if model.spare else None
    return replace(
        model,
        slots=tuple(slots.get(slot.id, slot) for slot in model.slots),
        canary=tuple(slots.get(slot.id, slot) for slot in model.canary),
        spare=spare if spare and not spare.waits else None,
    )


def _in_place(slot: Slot, need: Need, where: Spot | str, node: NodeSettings | None, nodes: Iterable[Node]) -> Slot:
    """A slot with a spot, or with the reason why it has none."""
    if isinstance(where, str):
        return replace(slot, waits=where)
    assert isinstance(slot.spec, WorkerSpec)
    assert node is not None
    known = {each.name: each for each in nodes}
    claim = claim_of(need, known[where.node], where)
    cpus = where.cpus or (cpu_list(node.cpus) if node.cpus else ())
    spec = replace(slot.spec, node=where.node, host=node.host, devices=where.devices, cpus=cpus)
    return replace(
        slot,
        spec=spec,
        digest=placed_digest(slot.digest, [spec.node, spec.host, spec.devices, spec.cpus, node.launcher]),
        memory_bytes=claim.memory_bytes,
        device_bytes=max(claim.device_bytes, default=0),
        launcher=node.launcher,
    )
