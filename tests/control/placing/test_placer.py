"""Placing the slots of a plan: running units stay, excluded ones move, and unplaceable ones say why."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from tests.control.units import replica

from forebay.control.placing.placer import Placer
from forebay.control.plan import Plan, PlannedModel
from forebay.core.cluster import Slo
from forebay.core.health.values import DeviceReading, Excluded
from forebay.core.model import ModelRoutes, Policy, Task, WorkerSpec
from forebay.core.placement.memory import Footprint
from forebay.core.placement.settings import GpuSettings, NodeSettings, PlacementSettings
from forebay.core.placement.values import GIB
from forebay.core.reconcile import Kind, Leaving, ObservedUnit, Slot, SlotState, State
from forebay.providers.machine import Machine

MACHINE = Machine((0, 1, 2, 3), 8 * GIB, ((0, 1), (2, 3)))


@dataclass
class World:
    """A placer, and what it is told of devices and of exclusions."""

    nodes: tuple[NodeSettings, ...] = ()
    excluded: Excluded = field(default_factory=Excluded)
    readings: dict[str, DeviceReading] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        self.placer = Placer(MACHINE, self.estimate, lambda: self.excluded, lambda: self.readings)

    def estimate(self, engine: str, artifact: str, settings: object, gpus: int) -> Footprint:
        self.asked += 1
        return Footprint(2 * GIB, GIB, 0) if not gpus else Footprint(8 * GIB // gpus, GIB, GIB)

    def placed(self, *models: PlannedModel, units: tuple[ObservedUnit, ...] = (), state: State | None = None) -> Plan:
        plan = Plan("test", "", (), models, nodes=self.nodes)
        return self.placer.placed(plan, units, state or State())


def model(name: str, replicas: int, spare: bool = False, **placement: object) -> PlannedModel:
    own = tuple(replica(f"{name}-{index}") for index in range(replicas + spare))
    return PlannedModel(
        ModelRoutes(name, Task.CHAT, Policy.P2C, "r-1", 10, 1.0),
        "synthetic",
        "synthetic",
        Slo(),
        own[:replicas],
        own[replicas] if spare else None,
        placement=PlacementSettings.model_validate(placement),
    )


def unit(slot: Slot, generation: int = 1) -> ObservedUnit:
    """What the provider says of a slot that was started."""
    assert isinstance(slot.spec, WorkerSpec)
    return ObservedUnit(
        slot.id,
        generation,
        Kind.REPLICA,
        slot.digest,
        5.0,
        True,
        node=slot.spec.node,
        devices=slot.spec.devices,
        cpus=slot.spec.cpus,
        memory_bytes=slot.memory_bytes,
        device_bytes=slot.device_bytes,
    )


def spots(plan: Plan) -> dict[str, str]:
    """Where each slot is, or that it waits."""
    found = {}
    for slot in plan.slots:
        assert isinstance(slot.spec, WorkerSpec)
        spot = ":".join(filter(None, (slot.spec.node, ",".join(slot.spec.devices))))
        found[slot.id] = "waits" if slot.waits else spot
    return found


TWO = (NodeSettings(name="a", cpus="0-1", memory_gib=4, launcher=("nice",)), NodeSettings(name="b", memory_gib=4))


def test_without_nodes_replicas_fill_the_local_machine() -> None:
    world = World()
    plan = world.placed(model("chat", 3, spare=True))
    assert spots(plan) == {"chat-0": "local", "chat-1": "local", "chat-2": "waits"}
    (chat,) = plan.models
    assert chat.slots[2].waits == "fits nowhere: local has 2 GiB of memory free of 8, 3 needed"
    assert chat.spare is None, "where there is no room, nobody stands in"
    assert chat.slots[0].memory_bytes == 3 * GIB
    assert world.asked == 1, "what is the same is estimated once"
    assert world.placer.note("chat-2") == chat.slots[2].waits


def test_node_settings_apply_to_slots_and_change_their_digest() -> None:
    world = World(TWO)
    first, second = world.placed(model("chat", 2)).slots
    assert isinstance(first.spec, WorkerSpec)
    assert isinstance(second.spec, WorkerSpec)
    assert (first.spec.node, first.spec.cpus, first.launcher) == ("a", (0, 1), ("nice",))
    assert (second.spec.node, second.spec.cpus, second.launcher) == ("b", (), ())
    world.nodes = (TWO[0], TWO[1].model_copy(update={"host": "10.0.0.2"}))
    again, moved = world.placed(model("chat", 2), units=(unit(first), unit(second))).slots
    assert again.digest == first.digest
    assert isinstance(moved.spec, WorkerSpec)
    assert (moved.spec.host, moved.digest != second.digest) == ("10.0.0.2", True)


def test_the_same_plan_gives_the_same_objects() -> None:
    world, chat = World(TWO), model("chat", 2)
    first = world.placed(chat)
    units = tuple(map(unit, first.slots))
    second = world.placed(chat, units=units)
    assert all(a is b for a, b in zip(first.slots, second.slots, strict=True))


def test_running_units_keep_their_place_after_a_restart() -> None:
    plan = World(TWO).placed(model("chat", 1, strategy="pack"), model("embed", 1))
    units = tuple(map(unit, plan.slots))
    again = World(TWO).placed(model("embed", 1), model("chat", 1), units=units)
    assert {slot.id: slot.digest for slot in again.slots} == {slot.id: slot.digest for slot in plan.slots}


def test_replicas_leave_a_drained_node_if_another_has_room() -> None:
    world, chat = World(TWO), model("chat", 1, spare=True)
    before = world.placed(chat)
    units = tuple(map(unit, before.slots))
    assert spots(before) == {"chat-0": "a"}
    assert world.placer.without("a") == ()
    world.excluded = Excluded(nodes={"a": "drained: new fans"})
    after = world.placed(chat, units=units)
    assert spots(after) == {"chat-0": "b"}
    assert after.models[0].spare is None, "there is no room for both"
    world.excluded = Excluded(nodes={"a": "drained: new fans", "b": "drained too"})
    stuck = world.placed(chat, units=units)
    assert stuck.slots[0].digest == units[0].digest
    assert world.placer.note("chat-0").startswith(
        "a is drained: new fans; it stays because it fits nowhere: a is drained"
    )
    assert world.placer.without("b") == ()


def test_drain_reports_replicas_that_fit_nowhere_else() -> None:
    world, both = World(TWO), (model("chat", 1), model("embed", 1))
    units = tuple(map(unit, world.placed(*both).slots))
    world.placed(*both, units=units)
    assert world.placer.without("b") == (
        "embed-0 fits nowhere: a has 1 GiB of memory free of 4, 3 needed; b is to be drained",
    )


def test_leaving_unit_reserves_its_room_for_its_own_slot() -> None:
    world = World((TWO[0],))
    (slot,) = world.placed(model("chat", 1)).slots
    state = State((SlotState("chat-0", 0.0, generation=1, leaving=(Leaving(1, 9.0, ""),)),))
    assert spots(world.placed(model("chat", 1), units=(unit(slot),), state=state)) == {"chat-0": "a"}
    assert spots(world.placed(model("embed", 1), units=(unit(slot),), state=state)) == {"embed-0": "waits"}


def test_slot_matching_a_running_unit_is_unchanged() -> None:
    world, chat = World(TWO), model("chat", 1)
    kept = ObservedUnit("chat-0", 1, Kind.REPLICA, chat.slots[0].digest, 5.0, True, node="b", memory_bytes=4 * GIB)
    plan = world.placed(chat, model("embed", 1), units=(kept,))
    assert plan.models[0].slots == chat.slots
    assert spots(plan)["embed-0"] == "a", "its room is taken all the same"


GPUS = (
    NodeSettings(
        name="a",
        gpus=(
            GpuSettings(id="GPU-0", memory_gib=24, links=("GPU-1",)),
            GpuSettings(id="GPU-1", memory_gib=24, links=("GPU-0",)),
        ),
    ),
)


@pytest.mark.parametrize(
    ("placement", "expected", "device_gib"),
    [
        ({"gpus": 1}, {"chat-0": "a:GPU-0", "chat-1": "a:GPU-1"}, 24),
        ({"gpus": 2}, {"chat-0": "a:GPU-0,GPU-1", "chat-1": "waits"}, 24),
        ({"gpus": 1, "memory_gib": 12}, {"chat-0": "a:GPU-0", "chat-1": "a:GPU-1"}, 12),
        ({"gpus": 1, "fraction": 0.25, "strategy": "pack"}, {"chat-0": "a:GPU-0", "chat-1": "a:GPU-0"}, 6),
        ({"gpus": 1, "mig": "1g.5gb"}, {"chat-0": "waits", "chat-1": "waits"}, 0),
    ],
)
def test_gpus_are_assigned_whole_or_fractionally(
    placement: dict[str, object], expected: dict[str, str], device_gib: int
) -> None:
    plan = World(GPUS).placed(model("chat", 2, spare=False, **placement))
    assert spots(plan) == expected
    assert plan.slots[0].device_bytes == device_gib * GIB


def test_gpu_memory_used_by_other_programs_is_not_assigned() -> None:
    chat = model("chat", 1, gpus=1)
    world = World(GPUS, readings={"GPU-0": DeviceReading("GPU-0", "a", memory_used_bytes=20 * GIB)})
    (slot,) = world.placed(chat).slots
    assert spots(world.placed(chat)) == {"chat-0": "a:GPU-1"}
    world.readings = {"GPU-1": DeviceReading("GPU-1", "a", memory_used_bytes=20 * GIB)}
    assert spots(world.placed(chat, units=(unit(slot),))) == {"chat-0": "a:GPU-1"}
    assert world.placer.nodes[0].devices[1].foreign_bytes == 0, "that is its own"


def test_discovered_gpus_are_used_when_none_are_configured() -> None:
    def reading(id: str, index: int, **more: object) -> DeviceReading:
        return replace(DeviceReading(id, "", index, memory_bytes=20 * GIB), **more)  # type: ignore[arg-type]

    found = [
        reading("GPU-0", 0, name="A100"),
        reading("MIG-1", 0, parent="GPU-0", profile="3g.20gb"),
        reading("GPU-2", 1, name="A100", links=("GPU-9",), numa=1),
        reading("GPU-3", 2, memory_bytes=None),
        reading("GPU-4", 0, node="elsewhere"),
    ]
    world = World(readings={each.device: each for each in found})
    plan = world.placed(model("chat", 1, gpus=1), model("small", 1, gpus=1, mig="3g.20gb"))
    assert spots(plan) == {"chat-0": "local:GPU-2", "small-0": "local:MIG-1"}
    assert [(d.id, d.kind, d.profile) for d in world.placer.nodes[0].devices] == [
        ("MIG-1", "A100", "3g.20gb"),
        ("GPU-2", "A100", ""),
    ]
    world.excluded = Excluded(devices={"GPU-2": "quarantined: XID 79"})
    units = tuple(unit(slot) for slot in plan.slots if not slot.waits)
    world.placed(model("chat", 1, gpus=1), model("small", 1, gpus=1, mig="3g.20gb"), units=units)
    assert world.placer.note("chat-0").startswith("GPU 1 of local is quarantined: XID 79; it stays")


def test_configured_mig_slices_replace_their_gpu() -> None:
    gpu = {"memory_gib": 40, "mig": [{"id": "MIG-1", "profile": "1g.10gb", "memory_gib": 10}]}
    world = World((NodeSettings.model_validate({"name": "a", "gpus": [gpu]}),))
    assert spots(world.placed(model("chat", 1, gpus=1, memory_gib=9))) == {"chat-0": "a:MIG-1"}
    waits = world.placed(model("chat", 1, gpus=1)).slots[0].waits
    assert waits == "", "a slice of its own is a device of its own"


def test_assigned_cores_are_kept_by_running_units() -> None:
    world, chat = World(), model("chat", 2, cpus=2)
    plan = world.placed(chat)
    cores = [slot.spec.cpus for slot in plan.slots if isinstance(slot.spec, WorkerSpec)]
    assert cores == [(0, 1), (2, 3)]
    again = World().placed(chat, units=(unit(plan.slots[1]),))
    assert again.slots[1].digest == plan.slots[1].digest
    assert again.slots[0].digest == plan.slots[0].digest


def test_replicas_leave_a_removed_node_if_another_has_room() -> None:
    world, chat = World(TWO), model("chat", 1)
    before = world.placed(chat)
    units = tuple(map(unit, before.slots))
    world.nodes = (TWO[1].model_copy(update={"memory_gib": 1}),)
    stuck = world.placed(chat, units=units)
    assert stuck.slots[0].digest == units[0].digest, "it runs on, for there is nothing else"
    assert world.placer.note("chat-0").startswith("node a no longer exists; it stays")
    assert spots(world.placed(chat)) == {"chat-0": "waits"}, "and is not started again"
    world.nodes = TWO[1:]
    assert spots(world.placed(chat, units=units)) == {"chat-0": "b"}
    assert spots(world.placed(model("embed", 1), units=units)) == {"embed-0": "b"}


def test_measured_memory_counts_and_large_underestimates_are_reported() -> None:
    told = []
    world = World((TWO[1],))
    world.placer = Placer(MACHINE, world.estimate, note=lambda kind, text: told.append((kind, text)))
    (slot,) = world.placed(model("chat", 1, memory_gib=1)).slots
    units = (replace(unit(slot), pid=7), replace(unit(slot), slot="gone-0", pid=8))
    footprints = world.placer.footprints
    footprints._read = lambda pids: {7: round(1.8 * GIB)}
    for _ in range(2):
        asyncio.run(footprints.measure(units, world.placer.needs))
    assert told == [
        (
            "memory",
            "chat-0 uses 1.8 GiB of memory and was estimated to need 1: set a higher `placement.memory_gib` for chat",
        )
    ], "once"
    both = (model("chat", 1, memory_gib=1), model("embed", 1))
    plan = world.placed(*both, units=units[:1])
    assert plan.models[1].slots[0].waits == "fits nowhere: b has 2.2 GiB of memory free of 4, 3 needed"
    (row,) = world.placer.rows()
    (shown,) = row.replicas
    assert (shown.slot, shown.memory_bytes, shown.memory_used_bytes) == (
        "chat-0",
        shown.memory_used_bytes,
        1.8 * GIB // 1,
    )
    assert (row.name, row.memory_bytes, row.memory_taken_bytes) == ("b", 4 * GIB, shown.memory_bytes)


def test_rows_show_devices_and_leaving_replicas() -> None:
    world, chat = World(GPUS), model("chat", 1, gpus=1)
    world.excluded = Excluded(devices={"GPU-1": "quarantined: XID 48"})
    (slot,) = world.placed(chat).slots
    state = State((SlotState("chat-0", 0.0, generation=1, leaving=(Leaving(1, 9.0, ""),)),))
    world.placed(chat, units=(unit(slot),), state=state)
    (row,) = world.placer.rows()
    assert [(d.name, d.taken_bytes, d.barred) for d in row.devices] == [
        ("GPU 0", 24 * GIB, ""),
        ("GPU 1", 0, "quarantined: XID 48"),
    ]
    assert [(r.slot, r.generation, r.devices, r.leaves) for r in row.replicas] == [("chat-0", 1, ("GPU-0",), True)]
