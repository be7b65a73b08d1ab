"""Device health under control: readings become placement restrictions, with hanging sources and no store too."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from forebay.control.health.health import Health, NodeRefused
from forebay.control.health.polling import Watch
from forebay.core.health import DeviceEvent, DeviceReading, Excluded, HealthRules, Throttle
from forebay.core.model import ModelRoutes, Policy, Replica, ReplicaState, Task
from forebay.core.placement.settings import GpuSettings, NodeSettings
from forebay.core.reconcile import Kind, ObservedUnit
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics
from forebay.providers.devices.protocol import DevicesUnknown
from forebay.store.database import Conflict, StoreDown, open_store
from forebay.store.documents import Changed, Documents, Kept
from forebay.store.schema import NODES

FINE = DeviceReading("gpu-0", throttles=(), life="boot-1", duty=0.5, temperature_c=60.0, memory_bytes=10)


@dataclass
class FakeDeviceSource:
    """A source with the readings and events that a test sets."""

    now: tuple[DeviceReading, ...] = (FINE,)
    news: list[DeviceEvent] = field(default_factory=list)
    fails: str = ""
    closed: bool = False

    def readings(self) -> tuple[DeviceReading, ...]:
        if self.fails:
            raise DevicesUnknown(self.fails)
        return self.now

    def events(self) -> tuple[DeviceEvent, ...]:
        news, self.news = self.news, []
        return tuple(news)

    def close(self) -> None:
        self.closed = True

    def hurt(self, xid: int, device: str = "gpu-0") -> None:
        self.news.append(DeviceEvent(wall_s(), device, xid))


@dataclass
class FakeStore:
    """A store in memory that a test can break."""

    kept: dict[str, Kept] = field(default_factory=dict)
    events: list[Changed] = field(default_factory=list)
    down: bool = False
    raced: bool = False

    def known(self) -> Mapping[str, Kept]:
        if self.down:
            raise StoreDown("sqlite: is locked")
        return dict(self.kept)

    def keep(self, node: str, kept: Kept, at: float, changed: tuple[Changed, ...]) -> Kept:
        if self.down:
            raise StoreDown("sqlite: is locked")
        if self.raced or self.kept.get(node, Kept()).version != kept.version:
            self.raced = False
            self.kept[node] = Kept(self.kept.get(node, kept).text, kept.version + 5)
            raise Conflict("changed")
        self.kept[node] = Kept(kept.text, kept.version + 1)
        self.events += changed
        return self.kept[node]

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Rig:
    """Health over parts of a test."""

    source: FakeDeviceSource = field(default_factory=FakeDeviceSource)
    store: FakeStore = field(default_factory=FakeStore)
    nodes: tuple[NodeSettings, ...] = ()
    told: list[tuple[str, str]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)

    def health(self) -> Health:
        async def run(work: Callable[[], object]) -> object:
            return work()

        return Health(
            self.store,  # type: ignore[arg-type]
            run,  # type: ignore[arg-type]
            {"local": self.source},
            note=lambda kind, why: self.told.append((kind, why)),
            metrics=self.metrics,
            rules=HealthRules(),
            poll_s=0.01,
            nodes=lambda: self.nodes,
        )

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


def play(story: Callable[[Rig], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await story(Rig())

    asyncio.run(bounded())


def unit(slot: str, *devices: str, node: str = "", generation: int = 1) -> ObservedUnit:
    return ObservedUnit(slot, generation, Kind.REPLICA, "d", 1.0, alive=True, pid=7, node=node, devices=devices)


def routes(*slots: str) -> tuple[ModelRoutes, ...]:
    replicas = tuple(Replica(slot, 1, "r", "127.0.0.1", 8100, ReplicaState.READY) for slot in slots)
    return (ModelRoutes("chat", Task.CHAT, Policy.CPR, "r", 10, 1.0, replicas),)


def test_device_needing_reset_is_quarantined_across_restarts() -> None:
    async def story(rig: Rig) -> None:
        health = rig.health()
        await health.begin()
        assert health.excluded == Excluded()
        rig.source.hurt(79)
        await health.look()

        why = "quarantined: XID 79: has fallen off the bus"
        assert health.excluded.devices == {"gpu-0": why}
        assert rig.told[-1] == ("device.quarantined", "gpu-0 of local: XID 79: has fallen off the bus")
        [event] = rig.store.events
        assert (event.kind, event.subject, event.document["xid"]) == ("device.quarantined", "node/local/gpu-0", 79)
        again = rig.health()
        await again.begin()
        assert again.excluded.devices == {"gpu-0": why}
        rig.source.now = (replace(FINE, life="boot-2"),)
        await again.look()
        assert again.excluded.devices == {}
        assert b'forebay_device_state{device="gpu-0",node="local",state="recovering"} 1.0' in rig.metrics.render()

    play(story)


def test_application_error_condemns_only_replicas_on_that_device() -> None:
    async def story(rig: Rig) -> None:
        rig.source.now = (FINE, replace(FINE, device="gpu-1"))
        health = rig.health()
        await health.begin()
        units = [unit("chat-0", "gpu-0"), unit("chat-1", "gpu-1"), unit("big-0", "gpu-0", "gpu-1"), unit("cpu-0")]
        assert health.condemned(units) == {}
        rig.source.hurt(94)
        await health.look()

        why = "its device gpu-0: XID 94: contained ECC error"
        assert health.condemned(units) == {("chat-0", 1): why, ("big-0", 1): why}
        assert health.condemned([unit("chat-0", "gpu-0", generation=2), *units[1:]]) == {("big-0", 1): why}
        assert health.excluded == Excluded()
        assert rig.kinds()[-1] == "device.restart"
        successor = [unit("chat-0", "gpu-0", generation=2)]
        assert health.condemned(successor) == {}
        for seconds in (10.0, 20.0):
            rig.source.news.append(DeviceEvent(wall_s() + seconds, "gpu-0", 94))
        await health.look()
        assert list(health.excluded.devices) == ["gpu-0"]
        assert list(health.condemned(successor)) == [("chat-0", 2)]

    play(story)


def test_replica_weight_is_that_of_its_slowest_device() -> None:
    async def story(rig: Rig) -> None:
        slow = replace(FINE, throttles=(Throttle.HEAT,), clock_mhz=500.0, clock_max_mhz=1000.0)
        rig.source.now = (slow, replace(FINE, device="gpu-1"))
        health = rig.health()
        await health.begin()
        health.condemned([unit("chat-0", "gpu-0", "gpu-1"), unit("chat-1", "gpu-1"), unit("chat-2")])

        [model] = health.weighed(routes("chat-0", "chat-1", "chat-2"))
        assert [replica.weight for replica in model.replicas] == [0.5, 1.0, 1.0]
        assert health.duty("chat") == 0.5
        assert health.duty("other") is None
        rig.source.now = (replace(FINE, device="gpu-1"),)
        fast = rig.health()
        await fast.begin()
        fast.condemned([unit("chat-0", "gpu-1")])
        before = routes("chat-0", "chat-1", "chat-2")
        assert fast.weighed(before) == before
        assert fast.weighed((model,)) == before

    play(story)


def test_failing_source_keeps_state_and_is_reported_once() -> None:
    async def story(rig: Rig) -> None:
        health = rig.health()
        await health.begin()
        rig.source.hurt(74)
        await health.look()
        before = health.excluded
        rig.source.fails = "no driver"
        for _ in range(3):
            await health.look()
        assert health.excluded == before
        assert rig.kinds().count("devices_unknown") == 1
        assert health.nodes()[0].trouble == "no driver"
        assert health.readings["gpu-0"].duty == 0.5
        health.condemned([unit("chat-0", "gpu-0")])
        assert health.duty("chat") is None
        rig.source.fails = ""
        await health.look()
        assert rig.told[-1] == ("devices_unknown", "the devices of local can be read again")
        rig.source.now = ()
        await health.look()
        assert health.excluded == before
        assert health.readings == {}
        assert [device.state for device in health.nodes()[0].devices] == ["draining"]
        rig.source.hurt(79, "gpu-7")
        await health.look()
        assert rig.kinds()[-1] == "device_unknown"
        health.close()
        assert rig.source.closed

    play(story)


def test_hanging_driver_is_not_polled_again_until_it_returns_and_its_events_are_kept() -> None:
    async def story(rig: Rig) -> None:
        free, asked = threading.Event(), []
        error = DeviceEvent(1.0, FINE.device, 79)

        class Hanging(FakeDeviceSource):
            def readings(self) -> tuple[DeviceReading, ...]:
                asked.append(1)
                assert free.wait(30.0)  # else a failure of this test would wait for the thread for ever
                return (FINE,)

            def events(self) -> tuple[DeviceEvent, ...]:
                return (error,) if len(asked) == 1 else ()

        source = Hanging()
        watch = Watch(source)
        assert "not responded for 0.05 s" in (await watch.look(0.05)).trouble
        assert "has not returned" in (await watch.look()).trouble
        watch.close()
        assert not source.closed
        free.set()
        while (late := await watch.look()).readings is None:
            await asyncio.sleep(0.01)
        assert (late.events, len(asked)) == ((error,), 1)
        assert ((await watch.look()).events, len(asked)) == ((), 2)
        watch.close()
        assert source.closed

    play(story)


def test_driver_exception_leaves_device_state_unchanged() -> None:
    async def story(rig: Rig) -> None:
        class Broken(FakeDeviceSource):
            def readings(self) -> tuple[DeviceReading, ...]:
                raise OSError("segment gone")

        look = await Watch(Broken()).look()
        assert (look.readings, look.trouble) == (None, "OSError: segment gone")

        class Deaf(FakeDeviceSource):
            def events(self) -> tuple[DeviceEvent, ...]:
                raise DevicesUnknown("no log")

        rig.source = Deaf()
        health = rig.health()
        await health.begin()
        assert rig.told[-1] == ("devices_unknown", "of the devices of local errors are not heard: no log")
        assert health.readings

    play(story)


def test_nodes_whose_devices_cannot_be_read_are_named_as_the_cluster_file_names_them() -> None:
    async def story(rig: Rig) -> None:
        rig.nodes = (NodeSettings(name="a"), NodeSettings(name="b"))
        rig.source.fails = "no driver"
        health = rig.health()
        await health.begin()
        assert [(each.name, each.trouble) for each in health.nodes()] == [("a", "no driver"), ("b", "")]
        assert source_up(rig) == {"a": 0.0}

        rig.source.fails = ""
        rig.source.now = (replace(FINE, node="b"),)
        await health.look()
        assert [(each.name, each.trouble) for each in health.nodes()] == [("a", ""), ("b", "")]
        assert source_up(rig) == {"b": 1.0}

    play(story)


def source_up(rig: Rig) -> dict[str, float]:
    lines = re.findall(r'forebay_device_source_up{node="(.+?)"} (.+)', rig.metrics.render().decode())
    return {node: float(value) for node, value in lines}


def test_drain_lasts_until_undrain_and_survives_restarts() -> None:
    async def story(rig: Rig) -> None:
        rig.nodes = (NodeSettings(name="a"), NodeSettings(name="b"))
        health = rig.health()
        await health.begin()
        health.condemned([unit("chat-0", node="a"), unit("chat-1", node="b")])
        node = await health.drain("a", "ada", "new fans")
        assert (node.state, node.replicas, node.by) == ("draining", ("chat-0",), "ada")
        assert health.excluded.nodes == {"a": "drained by ada: new fans"}
        health.condemned([unit("chat-0", node="b")])
        assert [each.state for each in health.nodes()] == ["drained", "serving"]

        again = rig.health()
        await again.begin()
        assert again.excluded.nodes == {"a": "drained by ada: new fans"}
        await again.undrain("a", "bob", "")
        assert (await again.undrain("a", "bob", "")).state == "serving"
        assert again.excluded == Excluded()
        assert [event.kind for event in rig.store.events] == ["node.drained", "node.undrained"]
        assert "forebay_node_drained" in rig.metrics.render().decode()

    play(story)


def test_drain_without_room_elsewhere_requires_force() -> None:
    async def story(rig: Rig) -> None:
        health = rig.health()
        await health.begin()
        health.condemned([unit("chat-0")])
        with pytest.raises(NodeRefused, match="chat-0: there is no other node that serves"):
            await health.drain("local", "ada", "")
        rig.nodes = (NodeSettings(name="local"), NodeSettings(name="b"))
        health.unplaceable = lambda node: (f"chat-0: of {node} needs 16 GiB, b has 12",)
        with pytest.raises(NodeRefused, match="needs 16 GiB"):
            await health.drain("local", "ada", "")
        assert health.excluded == Excluded()
        assert (await health.drain("local", "ada", "", force=True)).state == "draining"
        await health.drain("local", "ada", "again", force=True)
        with pytest.raises(NodeRefused) as refused:
            await health.drain("c", "ada", "")
        assert (refused.value.param, str(refused.value)) == ("node", "there is no node c; there is: b, local")

    play(story)


def test_device_cannot_be_released_while_its_fault_persists() -> None:
    async def story(rig: Rig) -> None:
        rig.source.now = (replace(FINE, remap_failed=True), replace(FINE, device="gpu-1"))
        health = rig.health()
        await health.begin()
        for device, param in (("gpu-9", "device"), ("gpu-1", "device"), ("gpu-0", None)):
            with pytest.raises(NodeRefused) as refused:
                await health.undrain("local", "ada", "", device)
            assert refused.value.param == (param if device == "gpu-9" else None)
        rig.source.now = (FINE,)
        await health.look()
        node = await health.undrain("local", "ada", "exchanged", "gpu-0")
        assert [(each.state, each.why) for each in node.devices] == [("recovering", "exchanged")]
        assert health.excluded == Excluded()
        assert rig.store.events[-1].subject == "node/local/gpu-0"

    play(story)


def test_store_outage_keeps_health_in_memory_and_writes_later() -> None:
    async def story(rig: Rig) -> None:
        rig.store.down = True
        health = rig.health()
        await health.begin()
        rig.source.hurt(64)
        await health.look()
        await health.drain("local", "ada", "fans")
        assert health.excluded.nodes
        assert health.excluded.devices
        assert rig.kinds().count("store_trouble") == 1
        assert health.trouble
        rig.store.down = False
        health._use._retry_at = 0.0
        await health.look()
        assert [event.kind for event in rig.store.events] == ["device.quarantined", "node.drained"]
        assert not health.trouble

    play(story)


def test_state_read_after_an_outage_is_merged_and_newer_changes_win() -> None:
    async def story(rig: Rig) -> None:
        first = rig.health()
        await first.begin()
        rig.source.hurt(79)
        await first.look()
        await first.drain("local", "ada", "fans")
        rig.store.down = True
        late = rig.health()
        await late.begin()
        assert late.excluded == Excluded()
        rig.store.down, late._use._retry_at = False, 0.0
        await late.look()
        assert late.excluded == first.excluded
        rig.store.down = True
        third = rig.health()
        await third.begin()
        await third.undrain("local", "bob", "")
        rig.store.down, third._use._retry_at = False, 0.0
        await third.look()
        assert third.excluded == Excluded({}, first.excluded.devices)
        rig.store.kept["local"] = Kept("{", 9)
        broken = rig.health()
        await broken.begin()
        assert "cannot be read" in rig.told[-1][1]

    play(story)


def test_conflicting_write_is_retried() -> None:
    async def story(rig: Rig) -> None:
        health = rig.health()
        await health.begin()
        rig.store.raced = True
        await health.drain("local", "ada", "")
        await health.undrain("local", "ada", "")
        await health.look()
        assert [event.kind for event in rig.store.events] == ["node.undrained"]

    play(story)


def test_devices_map_to_declaring_nodes_and_slices_inherit_from_their_gpu() -> None:
    async def story(rig: Rig) -> None:
        gpus = (GpuSettings(id="gpu-1", memory_gib=24),)
        rig.nodes = (NodeSettings(name="a"), NodeSettings(name="b", gpus=gpus))
        mig = DeviceReading("mig-1", parent="gpu-1", memory_bytes=5)
        rig.source.now = (FINE, replace(FINE, device="gpu-1"), mig, DeviceReading("gpu-2", node="c"))
        health = rig.health()
        await health.begin()
        assert {id: each.node for id, each in health.readings.items()} == {
            "gpu-0": "a", "gpu-1": "b", "gpu-2": "c", "mig-1": "b",
        }  # fmt: skip
        assert health.readings["mig-1"].temperature_c == 60.0
        rig.source.hurt(95, "gpu-1")
        await health.look()
        assert sorted(health.excluded.devices) == ["gpu-1", "mig-1"]
        assert [node.name for node in health.nodes()] == ["a", "b", "c"]

    play(story)


def test_health_loop_survives_errors_and_wakes_control() -> None:
    async def story(rig: Rig) -> None:
        health, woken = rig.health(), asyncio.Event()
        await health.begin()
        looking = asyncio.ensure_future(health.run(woken.set))  # noqa: TID251 - the loop of the test owns it
        rig.source.hurt(79)
        await woken.wait()
        health._watches["local"] = None  # type: ignore[assignment]
        while "trouble" not in rig.kinds():
            await asyncio.sleep(0.01)
        looking.cancel()

    play(story)


@pytest.mark.slow
def test_node_documents_and_events_are_stored_together(tmp_path: Path) -> None:
    records = Documents(
        NODES, lambda: open_store(f"sqlite:///{tmp_path / 'forebay.db'}"), "c", (tmp_path / "forebay.db").exists
    )
    assert records.known() == {}
    changed = [Changed("node.drained", 1.0, "ada", "node/a", "fans", {"x": 1})]
    first = records.keep("a", Kept('{"a":1}'), 1.0, changed)
    assert records.keep("a", first, 1.0, changed) == Kept('{"a":1}', 2)
    with pytest.raises(Conflict):
        records.keep("a", first, 1.0, changed)
    assert records.known() == {"a": Kept('{"a":1}', 2)}
    records.close()
    records.close()
