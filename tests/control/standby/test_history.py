"""Availability records of models, over in-memory units on virtual time."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.control.deploying.rig import Rig, controlled, play
from tests.control.deploying.world import START_S, World, wait

from forebay.control.journal import Journal
from forebay.control.rolling.watching import Looked
from forebay.control.standby import history as module
from forebay.control.standby.history import DAY_S, AvailabilityHistory, Day, past
from forebay.core.availability.history import AvailabilitySums, IncidentKind
from forebay.core.availability.measured import LifetimeSums
from forebay.core.model import Snapshot
from forebay.core.reconcile import State
from forebay.obs.clock import wall_s

DIED = "was killed by signal 9 (SIGKILL)"


def run_story(folder: Path, story: Callable[[Rig, AvailabilityHistory], Awaitable[None]], standby: int = 0) -> None:
    async def test(world: World) -> None:
        world.replicas = 1
        async with controlled(world, world.plan(standby=standby)) as rig:
            kept = with_history(rig)
            await rig.ready()
            await wait(30.0)
            await story(rig, kept)

    play(folder, test)


def with_history(rig: Rig) -> AvailabilityHistory:
    assert rig.control.standby
    kept = AvailabilityHistory(rig.world.places.availability, rig.journal, wall_s())
    rig.control.standby.history = kept
    return kept


def runs(world: World, generation: int) -> bool:
    return "chat-0" in world.alive() and world.generation("chat-0") == generation


def recorded_day(world: World, back_s: float = DAY_S) -> Day:
    return past(world.places.availability, wall_s() - back_s, wall_s())


def recorded_total(world: World) -> AvailabilitySums:
    return sum(recorded_day(world).models["chat"].values(), AvailabilitySums())


def test_observed_time_and_failures_are_recorded(tmp_path: Path) -> None:
    async def story(rig: Rig, kept: AvailabilityHistory) -> None:
        world = rig.world
        world.provider.end("chat-0", 1, DIED)
        await wait(60.0)
        kept.save()
        seen = recorded_total(world)

        assert 80.0 < seen.known_s <= 95.0
        assert START_S <= seen.down_s - START_S <= 2 * START_S  # the first start too
        assert seen.up_s == seen.full_s
        assert (seen.lived.failures, seen.lived.repairs, seen.lived.starts) == (1, 1, 2)
        assert START_S <= seen.lived.repair_s <= 2 * START_S
        assert seen.lived == kept.lifetimes("chat")
        starting, failure, outage = recorded_day(world).incidents
        assert (starting.what, starting.lasted_s is not None) == (IncidentKind.OUTAGE, True)
        assert (failure.what, failure.unit, failure.model) == (IncidentKind.FAILURE, "chat-0", "chat")
        assert DIED in failure.why
        assert (outage.what, outage.lasted_s) == (IncidentKind.OUTAGE, failure.lasted_s)

    run_story(tmp_path, story)


def test_failure_with_standby_is_not_an_outage(tmp_path: Path) -> None:
    async def story(rig: Rig, kept: AvailabilityHistory) -> None:
        world = rig.world
        before = kept.lifetimes("chat")
        world.provider.end("chat-0", 1, DIED)
        await wait(20.0)

        assert [each.what for each in recorded_day(world).incidents] == [IncidentKind.OUTAGE, IncidentKind.FAILURE]
        after = kept.lifetimes("chat")
        assert (after.promotions - before.promotions, after.failures) == (1, 1)
        assert after.promotion_s < 1.0

    run_story(tmp_path, story, standby=1)


def test_gateway_that_serves_until_its_successor_answers_is_no_outage(tmp_path: Path) -> None:
    async def story(rig: Rig, kept: AvailabilityHistory) -> None:
        world, plan = rig.world, rig.world.plan()
        before = len(recorded_day(world).incidents)
        changed = replace(plan, gateways=tuple(replace(slot, digest="changed") for slot in plan.gateways))
        rig.control.take_over(changed, None)
        await rig.until(lambda: world.generation("gateway-0") == 2)
        await wait(30.0)

        assert [unit.generation for unit in world.provider.alive() if unit.slot == "gateway-0"] == [2]
        assert len(recorded_day(world).incidents) == before

        world.provider.end("gateway-0", 2, DIED)
        await wait(30.0)
        assert "no gateway is ready" in [each.why for each in recorded_day(world).incidents[before:]]

    run_story(tmp_path, story)


def test_crash_series_counts_as_one_failure(tmp_path: Path) -> None:
    async def story(rig: Rig, kept: AvailabilityHistory) -> None:
        world = rig.world
        for generation in (1, 2, 3):
            await rig.until(partial(runs, world, generation))
            world.provider.end("chat-0", generation, DIED)
        await wait(30.0)

        found = kept.lifetimes("chat")
        assert (found.failures, found.repairs) == (1, 1)
        assert found.repair_s > START_S + 2.0

    run_story(tmp_path, story)


def test_unobserved_time_is_unknown_and_the_next_control_continues(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.replicas = 1
        async with controlled(world) as rig:
            with_history(rig)
            await rig.ready()
            await wait(30.0)
        before = recorded_total(world)
        await wait(3600.0)
        async with controlled(world) as rig:
            kept = with_history(rig)
            assert kept.lifetimes("chat") == before.lived
            await wait(30.0)
            rig.journal.note("rollout.rolled_back", "it was worse")
            rig.journal.note("something", "else")
            await wait(30.0)
            kept.save()

        assert before.known_s + 50.0 <= recorded_total(world).known_s <= before.known_s + 61.0
        assert [each.what for each in recorded_day(world).incidents][1:] == [IncidentKind.ROLLED_BACK]

    play(tmp_path, test)


def test_daily_files_are_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DAYS_MAX", 2)
    monkeypatch.setattr(module, "INCIDENTS_MAX", 1)

    async def test(world: World) -> None:
        folder, start = world.places.availability, 1000.0 * DAY_S - 25.0
        journal = Journal(world.places.log, lambda event: None)
        kept, nothing = AvailabilityHistory(folder, journal, start), Looked(State(), State(), (), {})
        plan = world.plan()
        kept.save()
        for name in ("notes", "1971-01-01"):
            (folder / f"{name}.json").write_text("{")
        for second in (0, 10, 20, 30, 40, 60, 2 * DAY_S, 2 * DAY_S + 15):
            journal.note("rollout.rolled_back", "again")
            kept.record(plan, nothing, Snapshot(1), float(second), start + second)
        kept.save()
        journal.close()

        assert sorted(path.stem for path in folder.iterdir()) == ["1972-09-26", "1972-09-27", "1972-09-28", "notes"]
        found = past(folder, start - 1.0, start + 2 * DAY_S + 100.0)
        assert (len(found.incidents), found.incidents_more) == (1, 6)
        assert sum(found.models["chat"].values(), AvailabilitySums()) == AvailabilitySums(known_s=55.0)
        assert past(folder, 0.0, 100.0) == Day()

    play(tmp_path, test)


def test_leader_change_is_an_incident(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        nothing, now = Looked(State(), State(), (), {}), wall_s()
        journal = Journal(world.places.log, lambda event: None)
        for at, epoch in enumerate((3, 3, 4)):
            AvailabilityHistory(tmp_path, journal, now).record(
                replace(world.plan(), models=()), nothing, Snapshot(1, epoch=epoch), at, now
            )
        journal.close()

        assert [(each.what, each.why) for each in past(tmp_path, now - 1, now).incidents] == [
            (IncidentKind.LEADER, "another control leads, epoch 4 after 3")
        ]

    play(tmp_path, test)


def test_removed_slot_is_no_repair(tmp_path: Path) -> None:
    async def story(rig: Rig, kept: AvailabilityHistory) -> None:
        world = rig.world
        world.never_ready = {world.routes.revision}
        world.provider.end("chat-0", 1, DIED)
        await wait(5.0)
        rig.control.take_over(replace(rig.control.plan, models=()), None)
        world.never_ready = set()
        await wait(60.0)

        assert kept.lifetimes("chat").repairs == 0
        assert kept.lifetimes("nobody") == LifetimeSums()
        assert not kept._down

    run_story(tmp_path, story)
