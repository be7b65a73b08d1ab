"""Standby pools under control, over in-memory units on virtual time: promotion, and no lost replicas."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.deploying.rig import SWIFT, Rig, controlled, play
from tests.control.deploying.world import NEW, OLD, START_S, World, wait

from forebay.control.changes import effects
from forebay.control.journal import Journal
from forebay.control.standby.history import AvailabilityHistory
from forebay.control.standby.standby import SPARES_MAX, Standby
from forebay.core.availability.measured import LifetimeSums
from forebay.core.deploy.rollout import Phase
from forebay.core.model import ReplicaState
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics

READY = ReplicaState.READY
DIED = "was killed by signal 9 (SIGKILL)"


def served(world: World) -> list[str]:
    return [f"{r.id}.{r.generation}" for r in world.routes.replicas if r.state is READY]


def with_pool(folder: Path, story: Callable[[Rig], Awaitable[None]], standby: int = 1, replicas: int = 2) -> None:
    async def test(world: World) -> None:
        world.replicas = replicas
        async with controlled(world, world.plan(standby=standby)) as rig:
            await rig.ready()
            await rig.until(lambda: rests(rig) == standby)
            await story(rig)

    play(folder, test)


def rests(rig: Rig) -> int:
    assert rig.control.standby
    return len(rig.control.standby.standbys)


def test_standby_replaces_a_dead_replica_whose_successor_becomes_standby(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        assert served(world) == ["chat-0.1", "chat-1.1"]
        assert sorted(world.alive()) == ["chat-0", "chat-1", "chat-2"]
        world.provider.end("chat-0", 1, DIED)
        await rig.until(lambda: served(world) == ["chat-1.1", "chat-2.1"], within_s=START_S / 2)
        await rig.until(lambda: rests(rig) == 1)
        await wait(5.0)

        assert rig.control.standby
        assert rig.control.standby.standbys == {("chat-0", 2)}
        assert served(world) == ["chat-1.1", "chat-2.1"]
        assert [(e.kind, e.unit) for e in world.journal if e.kind == "promoted"] == [("promoted", "chat-2")]
        assert b'forebay_promotions_total{model="chat"} 1.0' in rig.metrics.render()

    with_pool(tmp_path, story)


def test_two_standbys_replace_two_simultaneous_deaths(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        world.provider.end("chat-0", 1, DIED)
        world.provider.end("chat-1", 1, DIED)
        await rig.until(lambda: served(world) == ["chat-2.1", "chat-3.1"], within_s=START_S / 2)
        world.provider.end("chat-2", 1, DIED)
        await rig.until(lambda: rests(rig) == 2)

        assert len(served(world)) == 2
        assert "chat-3.1" in served(world)

    with_pool(tmp_path, story, standby=2)


def test_death_of_a_standby_does_not_change_the_snapshot(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        version = world.snapshot().version
        world.provider.end("chat-2", 1, DIED)
        await rig.until(lambda: rig.control.standby and rig.control.standby.standbys == {("chat-2", 2)})

        assert served(world) == ["chat-0.1", "chat-1.1"]
        assert world.snapshot().version == version, "nobody is told that it starts"

    with_pool(tmp_path, story)


def test_new_control_keeps_active_and_standby_roles(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.replicas = 2
        plan = world.plan(standby=1)
        async with controlled(world, plan) as rig:
            await rig.ready()
            await rig.until(lambda: rests(rig) == 1)
            world.provider.end("chat-0", 1, DIED)
            await rig.until(lambda: served(world) == ["chat-1.1", "chat-2.1"])
        world.provider.end("chat-1", 1, DIED)  # while nobody looks; chat-0 has not been started again
        async with controlled(world, plan) as rig:
            await rig.until(lambda: rests(rig) == 1 and len(served(world)) == 2)

            assert "chat-2.1" in served(world)
            assert {id for id, _ in rig.control.standby.standbys}.isdisjoint(  # type: ignore[union-attr]
                r.id for r in world.routes.replicas
            )

    play(tmp_path, test)


@pytest.mark.slow
def test_standby_covers_a_death_during_a_rollout(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        dead: list[str] = []

        def strike() -> None:
            if not dead and rig.rollout.phase is Phase.SETTLING:
                dead.append("chat-0")
                world.provider.end("chat-0", 1, DIED)

        await rig.deploy(course=SWIFT)
        world.acted = strike
        await rig.until(lambda: world.ready(NEW) == 3)
        strike()
        await rig.reaches(Phase.PROMOTED)
        await rig.until(lambda: rests(rig) == 1 and set(world.alive().values()) == {NEW})

        assert dead
        assert world.ready(NEW) == 2
        assert world.ready(OLD) == 0

    with_pool(tmp_path, story)


def test_a_rolling_replacement_is_covered_by_the_standby(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        fewest = []
        world.acted = lambda: fewest.append(len(served(world)))
        world.declared = "new"
        plan = world.plan(standby=1)
        await rig.deployments.take_over(plan)
        rig.control.take_over(plan, None)
        await rig.until(lambda: set(world.alive().values()) == {NEW} and rests(rig) == 1)

        assert len(world.alive()) == 3, "no spare was started besides"
        assert min(fewest) == 2

    with_pool(tmp_path, story)


def test_changed_standby_count_is_described(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        before, after = world.plan(), world.plan(standby=1, spares=2)
        assert effects(before, after) == ("chat: 2 replicas on standby, 0 before",)
        assert effects(after, after) == ()

    play(tmp_path, test)


def test_pools_follow_the_planned_models(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        pools = Standby(Metrics(), lambda *said, **more: None)
        plain = world.plan(standby=0)
        assert pools.pooled(plain) == plain
        asked = plain.models[0]
        for standby in (0, 2, 1):
            plan = replace(plain, models=(replace(asked, standby=standby),))
            [model] = pools.pooled(plan).models
            assert [slot.index for slot in model.slots] == list(range(3 + standby))
            assert model.active == (3 if standby else None)
            assert model.spare
            assert model.spare.index == 3 + standby
            assert pools.pooled(plan).models[0] is model
        nobody = replace(asked, slots=(), spare=asked.slots[0], standby=1)
        [model] = pools.pooled(replace(plain, models=(nobody,))).models
        assert ([slot.id for slot in model.slots], model.active) == (["chat-0"], 0)
        none = replace(nobody, spare=None)
        assert pools.pooled(replace(plain, models=(none,))).models == (none,)

    play(tmp_path, test)


@pytest.mark.parametrize(
    ("availability", "failures", "spares"),
    [(0.99, 0, 0), (0.9999, 0, 1), (0.99, 400, 2), (0.999999, 4000, SPARES_MAX)],
)
def test_auto_spares_meet_the_availability_target(
    tmp_path: Path, availability: float, failures: int, spares: int
) -> None:
    async def test(world: World) -> None:
        journal = Journal(world.places.log, world.journal.append)
        history = AvailabilityHistory(tmp_path / "availability", journal, wall_s())
        days_s = 86_400.0 * 30
        history._lifetimes["chat"] = LifetimeSums(days_s, failures, failures, failures * 900.0)
        pools = Standby(Metrics(), journal.note, history)
        plan = world.plan(spares="auto", slo={"availability": availability})
        assert len(pools.pooled(plan).models[0].slots) == 3 + spares
        journal.close()

    play(tmp_path, test)
