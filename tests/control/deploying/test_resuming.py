"""A new control, a changed cluster file, a store down at startup: what was deployed stays deployed."""

from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.deploying.rig import QUICK, SWIFT, Rig, controlled, play, started
from tests.control.deploying.test_rollouts import run_story
from tests.control.deploying.world import NEW, OLD, World, revision, wait

from forebay.control.plan import Plan
from forebay.core.deploy.rollout import Command, Phase
from forebay.core.rollout.planning import Step
from forebay.store.database import StoreDown


@pytest.mark.slow
def test_new_control_continues_a_rollout_without_restarting_units(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with controlled(world) as rig:
            await rig.ready()
            await rig.deploy(course=replace(QUICK, steps=(Step(0.5, 300.0),)))
            await rig.reaches(Phase.COMPARING)
            world.requests_per_s = 2.0
            await wait(61.0)
            seen, placed = rig.standing.seen, dict(world.provider.placed)
        world.shelf.takes_s = 30.0
        async with controlled(world) as rig:
            await wait(20.0)
            assert rig.control.state.slots
            assert world.provider.placed == placed
            await wait(20.0)
            assert world.provider.placed == placed
            assert rig.rollout.phase is Phase.COMPARING
            assert rig.standing.seen >= seen
            assert rig.standing.seen == len(world.samples)
            assert world.routes.split
            assert world.routes.split.share == 0.5

    play(tmp_path, test)


def test_deployed_revision_is_served_after_a_full_restart(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with controlled(world) as rig:
            await rig.ready()
            await rig.deploy(course=SWIFT)
            await rig.reaches(Phase.PROMOTED)
            rig.control.stop()
            await rig.task
        assert world.alive() == {}
        world.shelf.broken[NEW] = "the registry is away"
        async with controlled(world) as rig:
            await wait(10.0)
            assert world.alive() == {}
            world.shelf.broken.clear()
            await rig.until(lambda: world.ready(NEW) == 3)
            assert sorted(world.alive()) == ["chat-4", "chat-5", "chat-6"]

    play(tmp_path, test)


@pytest.mark.slow
def test_control_starts_with_the_last_deployment_while_the_store_is_down(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with controlled(world) as rig:
            await rig.ready()
            await rig.deploy(course=SWIFT)
            await rig.reaches(Phase.PROMOTED)
            await rig.deploy("newer", course=replace(QUICK, steps=(Step(0.5, 3000.0),)))
            await rig.reaches(Phase.COMPARING)
            world.requests_per_s = 2.0
            await wait(20.0)
            alive, placed, seen = world.alive(), dict(world.provider.placed), rig.standing.seen
        world.store.down = "the server is away"
        async with controlled(world) as rig:
            await wait(30.0)
            assert (world.alive(), world.provider.placed) == (alive, placed)
            assert world.routes.split
            assert world.routes.split.share == 0.5
            assert "the server is away" in rig.deployments.trouble
            world.store.down = ""
            await rig.until(lambda: not rig.deployments.trouble)
            assert rig.standing.seen >= seen
            await rig.deployments.command("chat:2", Command.ABORT, "ann", "")
            await rig.until(lambda: set(world.alive().values()) == {NEW})
            await rig.until(lambda: rig.standing.seen == len(world.samples))
        world.store.down = "again"
        world.declared = "newer"
        with pytest.raises(StoreDown, match="again"):
            await started(world)
        world.places.deployed.write_text("{")
        world.declared = "old"
        with pytest.raises(StoreDown, match="again"):
            await started(world)

    play(tmp_path, test)


def reloaded(rig: Rig, plan: Plan) -> Awaitable[None]:
    async def take_over() -> None:
        assert rig.deployments.problems(plan) == ()
        await rig.deployments.take_over(plan)
        rig.control.take_over(plan, None)
        await wait(1.0)

    return take_over()


def test_new_declared_revision_applies_only_after_the_rollout(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        await rig.deploy(course=SWIFT)
        await rig.until(lambda: world.ready(NEW))
        world.declared = "newer"
        [problem] = rig.deployments.problems(world.plan())
        assert "declares another revision while rollout chat:1 is under way" in problem
        await rig.reaches(Phase.PROMOTED)
        await rig.until(lambda: set(world.alive().values()) == {NEW})
        await reloaded(rig, world.plan())
        newer = revision("newer")
        await rig.until(lambda: world.alive() == {"chat-4": newer, "chat-5": newer, "chat-6": newer})
        assert rig.kinds[-1] == "target.set"

    run_story(tmp_path, story)


@pytest.mark.slow
def test_replica_count_can_change_during_a_rollout(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world, newer = rig.world, revision("newer")
        await rig.deploy(course=SWIFT)
        await rig.reaches(Phase.PROMOTED)
        await rig.until(lambda: sorted(world.alive()) == ["chat-4", "chat-5", "chat-6"])
        await rig.deploy("newer", course=replace(QUICK, steps=(Step(0.5, 3000.0),), settle_s=4.0))
        await rig.reaches(Phase.COMPARING)
        assert b'forebay_rollout_share{model="chat"}' in rig.metrics.render()
        world.replicas = 5
        await reloaded(rig, world.plan())
        await rig.until(lambda: world.ready(NEW) == 5 and world.ready(newer) == 3)
        world.replicas = 2
        await reloaded(rig, world.plan())
        await rig.until(lambda: (world.ready(NEW), world.ready(newer)) == (2, 1))
        await rig.deployments.command("chat:2", Command.ABORT, "ann", "")
        await rig.until(lambda: len(world.alive()) == 2 and world.ready(NEW) == 2)
        placed = dict(world.provider.placed)
        await rig.kill()
        async with controlled(world) as again:
            await wait(5.0)
            assert again.complete()
            assert world.alive() == {"chat-0": NEW, "chat-3": NEW}
            assert world.provider.placed == placed

    run_story(tmp_path, story)


def test_removing_a_model_ends_its_rollout(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.deploy()
        await rig.reaches(Phase.COMPARING)
        plan = rig.world.plan()
        await reloaded(rig, replace(plan, models=()))
        assert rig.rollout.why == "the model is no longer in the cluster file"
        await rig.until(lambda: not rig.world.alive())

    run_story(tmp_path, story)


def test_file_changed_while_control_was_down_rolls_back(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with controlled(world) as rig:
            await rig.ready()
            await rig.deploy()
            await rig.reaches(Phase.COMPARING)
        world.declared = "newer"
        async with controlled(world) as rig:
            assert rig.rollout.phase is Phase.ROLLED_BACK
            await rig.until(lambda: set(world.alive().values()) == {revision("newer")})
            assert rig.kinds[-1] == "rollout.rolled_back"

    play(tmp_path, test)


@pytest.mark.slow
def test_declared_revision_can_be_redeployed_without_a_registry(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.deploy(course=SWIFT)
        await rig.reaches(Phase.PROMOTED)
        rig.world.shelf.names.clear()
        await rig.deploy(OLD, course=SWIFT)
        await rig.until(lambda: rig.rollout.id == "chat:2" and rig.rollout.phase is Phase.PROMOTED)
        await rig.until(lambda: set(rig.world.alive().values()) == {OLD})
        assert sorted(rig.world.alive()) == ["chat-1", "chat-2", "chat-3"]

    run_story(tmp_path, story)
