"""A new plan for a running control: what is kept, how units are replaced, what is published."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.rig import Rig, controlled, plan
from tests.control.test_controller import complete, run
from tests.control.units import kill_all, replica

from forebay.control.leasing import Leases
from forebay.control.plan import Places, Plan
from forebay.core.model import Policy, ReplicaState
from forebay.core.reconcile import Rules

READY = ReplicaState.READY


class Losing:
    """Leads when a round begins, and no longer when it is asked again."""

    asked = 0
    status = None

    def why_not(self) -> str:
        self.asked += 1
        return "" if self.asked % 2 else "another control leads"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_all(tmp_path)


def wanted(folder: Path, replicas: int, digest: str = "d1", policy: Policy = Policy.P2C) -> Plan:
    """One model with a spare."""
    *slots, spare = (replica(f"chat-{index}", digest=digest) for index in range(replicas + 1))
    made = plan(folder, *slots)
    [model] = made.models
    return replace(made, models=(replace(model, spare=spare, routes=replace(model.routes, policy=policy)),))


def pids(rig: Rig) -> dict[str, int]:
    status = rig.status()
    return {unit.id: unit.pid for unit in [*status.gateways, *(r for m in status.models for r in m.replicas)]}


def test_route_and_count_changes_keep_other_units(folder: Path) -> None:
    async def test() -> None:
        async with controlled(folder, wanted(folder, 2)) as rig:
            await rig.until(complete(rig))
            before = pids(rig)

            rig.control.take_over(wanted(folder, 3, policy=Policy.ROUND_ROBIN), None)
            await rig.control.look()
            assert rig.snapshot().models[0].policy is Policy.ROUND_ROBIN
            await rig.until(lambda: len(pids(rig)) == 4 and rig.status().complete)
            assert pids(rig).items() > before.items()
            rig.control.take_over(wanted(folder, 1), None)
            await rig.until(lambda: len(pids(rig)) == 2 and rig.events("chat-1")[-1].state != "draining")

            assert pids(rig) == {id: before[id] for id in ("gateway-0", "chat-0")}
            assert [r.id for r in rig.snapshot().models[0].replicas] == ["chat-0"]

    run(test)


def test_rolling_replacement_keeps_ready_count(folder: Path) -> None:
    async def test() -> None:
        rules = Rules(look_again_s=0.1, look_again_starting_s=0.05)
        async with controlled(folder, wanted(folder, 2), rules=rules) as rig:
            await rig.until(complete(rig))
            fewest = 2

            def replaced() -> bool:
                nonlocal fewest
                fewest = min(fewest, [r.state for r in rig.snapshot().models[0].replicas].count(READY))
                return {u.digest for u in rig.control.units.values() if u.slot != "gateway-0"} == {"d2"}

            rig.control.take_over(wanted(folder, 2, "d2"), None)
            await rig.until(lambda: replaced() and len(pids(rig)) == 3 and rig.status().complete)

            assert fewest == 2
            assert {e.unit for e in rig.events() if e.kind == "placed"} == {"gateway-0", "chat-0", "chat-1", "chat-2"}
            await rig.until(lambda: len(rig.control.units) == 3)

    run(test)


def test_replaced_gateway_starts_before_the_old_one_leaves_no_gap(folder: Path) -> None:
    async def test() -> None:
        async with controlled(folder, wanted(folder, 1)) as rig:
            await rig.until(complete(rig))
            made = wanted(folder, 1)
            [gateway] = made.gateways

            rig.control.take_over(replace(made, gateways=(replace(gateway, digest="g2"),)), None)
            await rig.until(lambda: rig.status().complete and rig.status().gateways[0].generation == 2)
            await rig.until(lambda: len(rig.control.units) == 2)

            kinds = [(e.kind, e.generation) for e in rig.events("gateway-0")]
            assert kinds[-3:] == [("leaves", 1), ("placed", 2), ("serves", 2)]

    run(test)


def test_removed_model_drains_and_leaves_snapshot_and_metrics(folder: Path) -> None:
    async def test() -> None:
        both = plan(folder, replica("chat-0"), replica("embed-0"))
        async with controlled(folder, both) as rig:
            await rig.until(complete(rig))
            assert b'forebay_replicas{model="embed"' in rig.metrics.render()

            rig.control.take_over(plan(folder, replica("chat-0")), None)
            await rig.until(lambda: ("embed-0", 1) not in rig.control.units)

            assert [m.name for m in rig.snapshot().models] == ["chat"]
            assert b'forebay_replicas{model="embed"' not in rig.metrics.render()
            assert any("no longer wanted" in e.why for e in rig.events("embed-0"))
            assert rig.status().complete

    run(test)


@asynccontextmanager
async def lending(folder: Path) -> AsyncIterator[tuple[Rig, Path]]:
    """A control that begins to grant leases, and their file, once it is there."""
    async with controlled(folder, wanted(folder, 1)) as rig:
        await rig.until(complete(rig))
        path = Places(folder).leases
        rig.control.take_over(wanted(folder, 1), Leases(path, {}, ["gateway-0"]))
        await rig.until(path.exists)
        yield rig, path


def test_changed_leases_apply_from_the_next_round(folder: Path) -> None:
    async def test() -> None:
        async with lending(folder) as (_, path):
            assert path.exists()

    run(test)


def test_control_that_loses_the_lead_while_it_looks_grants_no_leases(folder: Path) -> None:
    async def test() -> None:
        async with lending(folder) as (rig, path):
            rig.control.leading = losing = Losing()
            await rig.until(lambda: losing.asked >= 2)
            granted = path.stat().st_mtime_ns
            await rig.until(lambda: losing.asked >= 8)
            assert path.stat().st_mtime_ns == granted

    run(test)
