"""Snapshots for gateways, probes, and plans made from cluster files."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.control.rig import plan
from tests.control.units import kill_all, local, replica, wait_for
from tests.net.rig import no_descriptors

from forebay.control.plan import Artifact, Places, make_plan
from forebay.control.probe import Prober
from forebay.control.snapshot import SnapshotFile, make_routes
from forebay.core.admission import Band
from forebay.core.cluster import Cluster
from forebay.core.model import (
    Dispatch,
    Endpoint,
    LoadReport,
    ModelRoutes,
    Policy,
    Replica,
    ReplicaState,
    Rule,
    Snapshot,
    StandIn,
    Task,
    When,
)
from forebay.core.reconcile import Answered, Kind, Leaving, ObservedUnit, Silent, SlotState, State, UnitState
from forebay.core.tenancy import Quota, Tenant

HERE = Endpoint(7, "127.0.0.1", 8100)
UNIT = ObservedUnit("chat-0", 2, Kind.REPLICA, "d1", 5.0, True, 7, HERE)
REPORT = LoadReport("chat-0", 2, "chat", "r-9", ReplicaState.READY)
KEY = ("chat-0", 2)
ROUTES = (ModelRoutes("chat", Task.CHAT, Policy.P2C, "r-1", 10, 1.0),)


def state(
    state: ReplicaState = ReplicaState.STOPPED, unit: UnitState | None = None, leaving: tuple[Leaving, ...] = ()
) -> State:
    return State((SlotState("chat-0", 0.0, state, generation=2, unit=unit, leaving=leaving),))


def replicas(
    tmp_path: Path, now: State, reports: dict[tuple[str, int], LoadReport], *before: Replica
) -> list[Replica]:
    kept = {(r.id, r.generation): r for r in before}
    [model] = make_routes(plan(tmp_path, replica("chat-0")), now, {KEY: UNIT}, reports, kept)
    return list(model.replicas)


def test_ready_replica_is_published_with_its_reported_revision(tmp_path: Path) -> None:
    now = state(state=ReplicaState.READY, unit=UnitState(2, 0.0))

    assert replicas(tmp_path, now, {KEY: REPORT}) == [
        Replica("chat-0", 2, "r-9", "127.0.0.1", 8100, ReplicaState.READY)
    ]


def test_leaving_replica_is_published_as_draining(tmp_path: Path) -> None:
    now = state(state=ReplicaState.DRAINING, leaving=(Leaving(2, 9.0, "outdated"),))

    assert [r.state for r in replicas(tmp_path, now, {KEY: REPORT})] == [ReplicaState.DRAINING]


def test_replica_without_a_report_keeps_its_published_state(tmp_path: Path) -> None:
    now = state(state=ReplicaState.STARTING, unit=UnitState(2, 0.0))
    before = Replica("chat-0", 2, "r-9", "127.0.0.1", 8100, ReplicaState.READY)
    older = Replica("chat-0", 1, "r-9", "127.0.0.1", 8099, ReplicaState.READY)

    assert replicas(tmp_path, now, {}, before) == [before]
    assert replicas(tmp_path, now, {}, older) == []


def test_an_empty_slot_is_not_published(tmp_path: Path) -> None:
    assert replicas(tmp_path, state(), {KEY: REPORT}) == []


def test_snapshot_version_increases_only_on_change(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    routes = plan(tmp_path, replica("chat-0")).models[0].routes
    first = SnapshotFile(path)
    first.read()
    assert first.write(())
    version = first.current.version
    assert not first.write(())
    assert first.write((routes,))
    assert first.current.version == version + 1

    second = SnapshotFile(path)
    second.read()
    assert second.current == Snapshot(version + 1, (routes,))
    path.write_text("{half a docu")
    third = SnapshotFile(path)
    third.read()
    assert third.write((routes,))
    assert third.current.version >= version
    assert msgspec.json.decode(path.read_bytes(), type=Snapshot) == third.current
    path.unlink()
    assert third.write((routes,))


def test_dispatch_changes_alone_publish_a_new_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    names = Dispatch({"best": "chat"}, (Rule("auto", "chat", "r-1", When(Task.CHAT, header="x-tier")),))
    file = SnapshotFile(path)
    assert file.write((), names)
    assert msgspec.json.decode(path.read_bytes(), type=Snapshot).dispatch == names
    assert not file.write((), names)
    assert file.write(())
    path.write_text('{"version": 3, "models": []}')
    file.read()
    assert file.current == Snapshot(3)


def test_tenant_changes_alone_publish_a_new_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    tenants = (Tenant("t", ("chat*",), Band.BATCH, limits=Quota(streams_max=3)),)
    file = SnapshotFile(path)
    assert file.write((), None, tenants)
    assert msgspec.json.decode(path.read_bytes(), type=Snapshot).tenants == tenants
    assert not file.write((), None, tenants)
    assert file.write((), None, ())


def test_plan_takes_aliases_and_fallbacks_from_the_cluster_file(tmp_path: Path) -> None:
    model = {"task": "chat", "source": "x", "engine": "synthetic"}
    document = {
        "models": [
            {**model, "name": "big", "fallback": ["small"], "fallback_default": "deny", "price_per_mtok": 3},
            {**model, "name": "small"},
        ],
        "aliases": {"best": "top", "top": "big"},
        "routes": [{"name": "auto", "then": "best"}],
    }
    artifact = Artifact(Path("/x"), "digest", "synthetic", {})
    made = make_plan(Cluster.model_validate(document), {"big": artifact, "small": artifact}, Places(tmp_path), "1")

    assert made.dispatch == Dispatch({"best": "big", "top": "big"}, (Rule("auto", "big"),))
    routes = made.models[0].routes
    assert (routes.fallback, routes.fallback_default, routes.price_per_mtok) == ((StandIn("small"),), False, 3)
    assert made.models[1].routes.fallback_default


def test_probe_ignores_responses_of_other_units(tmp_path: Path) -> None:
    async def test() -> None:
        provider, prober = local(tmp_path), Prober(tmp_path / "peers")
        try:
            await provider.place(replica("chat-0"), 1)
            unit = await wait_for(provider, "chat-0", lambda u: u.endpoint)
            other = ObservedUnit("embed-0", 1, Kind.REPLICA, "d", 5.0, True, unit.pid, unit.endpoint)
            nobody = ObservedUnit("none-0", 1, Kind.REPLICA, "d", 5.0, True, 7, Endpoint(7, "127.0.0.1", 1))
            unheard = ObservedUnit("new-0", 1, Kind.REPLICA, "d", 5.0, True, 7, None)

            answers = await prober.ask([unit, other, nobody, unheard])

            assert isinstance(answers[unit.key], Answered)
            assert answers[other.key] == Silent("chat-0 generation 1 responds at its address")
            assert isinstance(answers[nobody.key], Silent)
            assert unheard.key not in answers
        finally:
            provider.close()

    try:
        asyncio.run(test())
    finally:
        kill_all(tmp_path)


def test_probe_that_this_process_has_no_file_descriptor_for_says_nothing_of_the_unit(tmp_path: Path) -> None:
    async def test() -> None:
        prober = Prober(tmp_path / "peers")
        nobody = ObservedUnit("none-0", 1, Kind.REPLICA, "d", 5.0, True, 7, Endpoint(7, "127.0.0.1", 1))
        with no_descriptors():
            assert await prober.ask([nobody]) == {}
        assert "Too many open files" in prober.trouble
        assert isinstance((await prober.ask([nobody]))[nobody.key], Silent)
        assert prober.trouble == ""

    asyncio.run(test())


def test_slot_digest_changes_with_artifact_and_version(tmp_path: Path) -> None:
    document = {
        "gateway": {"processes": 2},
        "models": [{"name": "chat", "task": "chat", "source": "x", "engine": "synthetic", "replicas": 2}],
    }
    artifact = Artifact(Path("/x"), "digest", "synthetic", {"step_ms": 1.0})
    cluster = Cluster.model_validate(document)
    made = make_plan(cluster, {"chat": artifact}, Places(tmp_path), "1")

    assert [s.id for s in made.slots] == ["gateway-0", "gateway-1", "chat-0", "chat-1"]
    assert made == make_plan(cluster, {"chat": artifact}, Places(tmp_path), "1")
    newer = make_plan(cluster, {"chat": artifact}, Places(tmp_path), "2")
    assert not {s.digest for s in made.slots} & {s.digest for s in newer.slots}
    other = Artifact(Path("/x"), "another digest", "synthetic", {"step_ms": 1.0})
    changed = make_plan(cluster, {"chat": other}, Places(tmp_path), "1")
    assert changed.models[0].routes.revision != made.models[0].routes.revision
    assert [a.digest == b.digest for a, b in zip(made.slots, changed.slots, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    document["models"][0]["replicas"] = 3  # type: ignore[index]
    more = make_plan(Cluster.model_validate(document), {"chat": artifact}, Places(tmp_path), "1")
    assert [s.digest for s in more.slots[:4]] == [s.digest for s in made.slots]


def on_disk(path: Path) -> Snapshot:
    return msgspec.json.decode(path.read_bytes(), type=Snapshot)


def test_unchanged_snapshot_is_not_rewritten(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "snapshot.json")
    assert file.write(ROUTES)
    assert not file.write(ROUTES)
    successor = SnapshotFile(tmp_path / "snapshot.json")
    successor.read()
    assert not successor.write(ROUTES)


@pytest.mark.parametrize("content", [None, b"", b"\0" * 50, msgspec.json.encode(Snapshot(1))])
def test_snapshot_file_changed_by_others_is_rewritten(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "snapshot.json"
    file = SnapshotFile(path)
    file.write(ROUTES)
    version = file.current.version
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert file.write(ROUTES)
    assert on_disk(path) == file.current
    assert file.current.models == ROUTES
    assert file.current.version > version
    assert not file.write(ROUTES)
