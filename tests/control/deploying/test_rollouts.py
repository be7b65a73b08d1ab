"""Rollouts over a store, in-memory units and simulated gateways: the usual course, and faults."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.control.deploying.rig import QUICK, SWIFT, Rig, controlled, play
from tests.control.deploying.world import NEW, OLD, World, wait

from forebay.control.deploying import DeployRefused, RolloutRequest
from forebay.control.status import make_status
from forebay.core.deploy.course import COURSES, Kind
from forebay.core.deploy.rollout import KNOWN_S, Command, Phase
from forebay.core.rollout.planning import Step
from forebay.store.database import StoreDown

EASY = {
    "errors": {"ratio": 4, "floor": 0.3},
    **{name: {"required": False} for name in ("ttft", "tpot", "latency", "length")},
}
Story = Callable[[Rig], Awaitable[None]]


def run_story(
    folder: Path, story: Story, prepare: Callable[[World], None] = lambda world: None, **model: object
) -> None:
    """Run a story on a cluster that is ready."""

    async def test(world: World) -> None:
        world.requests_per_s = 60.0
        prepare(world)
        async with controlled(world, world.plan(**model)) as rig:
            await rig.ready()
            await story(rig)

    play(folder, test)


@pytest.mark.slow
def test_healthy_canary_is_promoted_step_by_step(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        standing = await rig.deploy()
        assert (standing.rollout.id, standing.rollout.phase, standing.created_by) == ("chat:1", "starting", "ann")
        await rig.until(lambda: world.routes.split)
        assert world.routes.split
        assert world.routes.split.share == 0.0
        await rig.reaches(Phase.COMPARING)
        await rig.until(lambda: world.routes.split and world.routes.split.share == 0.2)
        assert world.alive() == {"chat-0": OLD, "chat-1": OLD, "chat-2": OLD, "chat-4": NEW}
        assert rig.control.plan.models[0].routes.revision == OLD
        await rig.reaches(Phase.SETTLING)
        await rig.until(lambda: world.routes.split and world.routes.split.share == 1.0)
        assert len(world.alive()) == 6
        await rig.reaches(Phase.PROMOTED)
        await rig.until(lambda: set(world.alive().values()) == {NEW})
        assert sorted(world.alive()) == ["chat-4", "chat-5", "chat-6"]
        assert (world.routes.split, world.routes.revision) == (None, NEW)
        assert world.provider.placed == {"gateway-0": 1, **{f"chat-{index}": 1 for index in (0, 1, 2, 4, 5, 6)}}
        kinds = rig.kinds
        assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("rollout.started", "rollout.promoted", {"rollout.step"})
        assert rig.standing.verdict
        assert rig.standing.seen > 1000

    run_story(tmp_path, story, rollout=EASY)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("errors", "x server_error of the canary"),
        ("dies", "chat-4: generation 1 was killed by signal 9"),
        ("memory", "out_of_memory of the canary"),
        ("engine", "chat-4: its engine has died"),
        ("worse", "errors"),
    ],
)
def test_harmful_canary_is_rolled_back_at_once(tmp_path: Path, how: str, said: str) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        world.errors = {NEW: {"errors": 1.0, "worse": 0.2}.get(how, 0.0)}
        await rig.deploy()
        await rig.reaches(Phase.COMPARING)
        await wait(1.0)
        match how:
            case "dies":
                world.provider.end("chat-4", 1, "was killed by signal 9 (SIGKILL)")
            case "memory":
                world.provider.end("chat-4", 1, "ended with exit code 1: CUDA out of memory")
            case "engine":
                world.engine_restarts["chat-4"] = 1
        await rig.reaches(Phase.ROLLED_BACK, within_s=5.0 if how != "worse" else 100.0)
        assert said in rig.rollout.why
        await rig.until(lambda: set(world.alive().values()) == {OLD})
        assert sorted(world.alive()) == ["chat-0", "chat-1", "chat-2"]
        assert world.routes.split is None
        assert rig.kinds[-1] == "rollout.rolled_back"

    run_story(tmp_path, story)


@pytest.mark.slow
def test_unpreparable_revision_is_rolled_back_and_can_be_retried(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.world.shelf.broken[NEW] = "model.gguf: it has another SHA-256"
        await rig.deploy()
        await rig.reaches(Phase.ROLLED_BACK, within_s=5.0)
        assert rig.rollout.why == "model.gguf: it has another SHA-256"
        rig.world.shelf.broken.clear()
        await rig.deploy(course=SWIFT)
        await rig.reaches(Phase.PROMOTED, within_s=20.0)

    run_story(tmp_path, story)


@pytest.mark.slow
def test_status_explains_why_the_deployed_revision_cannot_start(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.requests_per_s = 60.0
        async with controlled(world) as rig:
            await rig.ready()
            await rig.deploy(course=SWIFT)
            await rig.reaches(Phase.PROMOTED)
            await rig.until(lambda: set(rig.world.alive().values()) == {NEW})
        for slot in world.alive():
            world.provider.end(slot, world.generation(slot), "was killed by signal 9 (SIGKILL)")
        world.shelf.broken[NEW] = "model.gguf: it has another SHA-256"
        async with controlled(world) as rig:
            await rig.until(lambda: rig.deployments.hindrance("chat", NEW))
            [model] = make_status(rig.control, 0.0, 0.0).models
            assert (model.ready, model.revision) == (0, NEW)
            assert model.trouble == "model.gguf: it has another SHA-256"
            world.shelf.broken.clear()
            await rig.ready()
            [model] = make_status(rig.control, 0.0, 0.0).models
            assert (model.ready, model.trouble) == (world.replicas, "")

    play(tmp_path, test)


@pytest.mark.slow
def test_download_time_does_not_count_as_start_time(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.world.shelf.takes_s = 300.0
        await rig.deploy(course=SWIFT)
        await wait(200.0)
        assert "is being prepared" in rig.rollout.why
        await rig.reaches(Phase.PROMOTED)

    run_story(tmp_path, story)


@pytest.mark.slow
def test_never_ready_replicas_roll_back(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.world.never_ready.add(NEW)
        await rig.deploy()
        await rig.reaches(Phase.ROLLED_BACK, within_s=70.0)
        assert "0 of 1 replicas" in rig.rollout.why

    run_story(tmp_path, story)


@pytest.mark.slow
def test_store_outage_pauses_progress_but_stops_harm(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        await rig.deploy(course=replace(QUICK, steps=(Step(0.2, 20.0), Step(0.5, 600.0))))
        await rig.reaches(Phase.COMPARING)
        world.store.down = "the server is away"
        await wait(60.0)
        assert rig.rollout.step == 0
        assert world.routes.split
        assert world.routes.split.share == 0.2
        assert "the server is away" in rig.deployments.trouble
        for ask in (
            lambda: rig.deployments.command("chat:1", Command.ABORT, "ann", ""),
            lambda: rig.deployments.deploy(RolloutRequest("chat", "newer", QUICK), "ann"),
        ):
            with pytest.raises(StoreDown):
                await ask()
        world.store.down = ""
        await rig.until(lambda: rig.rollout.step == 1, within_s=5.0)
        assert not rig.deployments.trouble
        world.store.down = "again"
        world.errors = {NEW: 1.0}
        await rig.until(lambda: world.routes.split and world.routes.split.share == 0.0, within_s=20.0)
        await wait(100.0)
        assert rig.rollout.phase is Phase.COMPARING
        assert len(world.alive()) == 5
        world.store.down = ""
        await rig.reaches(Phase.ROLLED_BACK, within_s=5.0)
        assert [event.kind for event in world.journal].count("store_trouble") == 2

    run_story(tmp_path, story)


def test_lost_commit_response_does_not_repeat_the_write(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        store = rig.world.store
        store.loses_answer = True
        with pytest.raises(StoreDown):
            await rig.deploy(course=SWIFT)
        with pytest.raises(DeployRefused, match="chat:1 of chat is under way"):
            await rig.deploy(course=SWIFT)
        await rig.until(lambda: rig.rollout.phase is Phase.SETTLING)
        store.loses_answer = True
        await rig.reaches(Phase.PROMOTED)
        assert len(await rig.deployments.past("chat", 10)) == 1

    run_story(tmp_path, story)


def test_share_drops_when_its_replicas_are_not_ready(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        await rig.deploy(course=SWIFT)
        await rig.until(lambda: world.routes.split and world.routes.split.share == 1.0)
        world.never_ready.add(NEW)
        await rig.until(lambda: world.routes.split and world.routes.split.share == 0.0)
        world.never_ready.clear()
        await rig.reaches(Phase.PROMOTED)

    run_story(tmp_path, story)


def test_old_replicas_stay_for_a_while_after_a_drop_of_the_share_that_was_not_stored(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        await rig.deploy(course=SWIFT)
        await rig.until(lambda: world.routes.split and world.routes.split.share == 1.0)
        world.store.down = "locked"
        world.never_ready.add(NEW)
        await rig.until(lambda: world.routes.split and world.routes.split.share == 0.0)
        await wait(SWIFT.settle_s)
        world.store.down = ""
        world.never_ready.clear()
        await rig.until(lambda: world.routes.split and world.routes.split.share == 1.0)
        told_at = asyncio.get_running_loop().time()
        await rig.reaches(Phase.PROMOTED)
        assert asyncio.get_running_loop().time() - told_at > KNOWN_S - 0.2  # `until` looks every 0.1 s

    run_story(tmp_path, story)


@pytest.mark.slow
def test_rollout_can_be_paused_resumed_promoted_and_aborted(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.deploy()
        await rig.reaches(Phase.COMPARING)
        paused = await rig.deployments.command("chat:1", Command.PAUSE, "ben", "lunch")
        assert (paused.rollout.paused, paused.rollout.why) == (True, "paused by ben: lunch")
        await wait(300.0)
        assert rig.rollout.step == 0
        await rig.deployments.command("chat:1", Command.RESUME, "ben", "")
        await rig.until(lambda: rig.rollout.step == 1)
        await rig.deployments.command("chat:1", Command.PROMOTE, "ben", "")
        await rig.reaches(Phase.SETTLING, within_s=10.0)
        await rig.deployments.command("chat:1", Command.ABORT, "eve", "no")
        assert rig.rollout.why == "aborted by eve: no"
        with pytest.raises(DeployRefused, match="has ended: rolled_back"):
            await rig.deployments.command("chat:1", Command.ABORT, "eve", "no")
        with pytest.raises(DeployRefused, match="no rollout chat:7"):
            await rig.deployments.command("chat:7", Command.ABORT, "eve", "")
        kinds = [kind for kind in rig.kinds if kind != "rollout.step"]
        assert kinds == [f"rollout.{each}" for each in ("started", "paused", "resumed", "forced", "aborted")]
        await rig.until(lambda: set(rig.world.alive().values()) == {OLD})

    run_story(tmp_path, story)


@pytest.mark.slow
def test_shadow_and_ab_rollouts_change_no_target(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        for kind in (Kind.SHADOW, Kind.AB):
            await rig.deploy(course=replace(COURSES[kind], steps=(Step(0.5, 60.0),)))
            await rig.reaches(Phase.COMPARING)
            await rig.until(lambda: world.routes.split and world.routes.split.share + world.routes.split.mirrored)
            split = world.routes.split
            assert split
            assert (split.mirrored, split.share) == ((0.5, 0.0) if kind is Kind.SHADOW else (0.0, 0.5))
            assert split.sticky == ("request" if kind is Kind.SHADOW else "caller")
            await rig.reaches(Phase.JUDGED)
            await rig.until(lambda: set(world.alive().values()) == {OLD})
        assert rig.standing.effects
        assert len(await rig.deployments.past(None, 10)) == 2

    run_story(tmp_path, story)


@pytest.mark.parametrize(
    ("wish", "said", "param"),
    [
        (RolloutRequest("nobody", "new", QUICK), "there is no model nobody; there is: chat", "model"),
        (RolloutRequest("chat", "unheard", QUICK), "there is no such revision", "revision"),
        (RolloutRequest("chat", "old", QUICK), "serves r-.* already", "revision"),
        (RolloutRequest("chat", "new", replace(QUICK, steps=())), "at least one for a canary", "plan"),
        (
            RolloutRequest("chat", "new", replace(QUICK, steps=(Step(0.05, 60.0),))),
            "cannot reach a verdict in its time",
            "plan",
        ),
    ],
)
def test_invalid_deploy_request_names_the_parameter(
    tmp_path: Path, wish: RolloutRequest, said: str, param: str
) -> None:
    async def story(rig: Rig) -> None:
        await wait(40.0)
        with pytest.raises(DeployRefused, match=said) as caught:
            await rig.deployments.deploy(wish, "ann")
        assert caught.value.param == param
        assert rig.deployments.standing() == ()
        if "decide" in said:
            await rig.deployments.deploy(replace(wish, unchecked=True), "ann")
            with pytest.raises(DeployRefused, match="chat:1 of chat is under way"):
                await rig.deploy("newer")

    run_story(tmp_path, story)


def test_unreadable_golden_set_is_rejected_at_deploy(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        with pytest.raises(DeployRefused, match=r"gone\.jsonl: it cannot be read") as caught:
            await rig.deploy()
        assert caught.value.param is None, "the golden set is in the cluster file, not in the request"

    run_story(tmp_path, story, rollout={"golden": {"file": str(tmp_path / "gone.jsonl")}})


def raise_key_error(*_: object) -> None:
    raise KeyError("of ours")


def test_internal_error_in_deployments_leaves_reconciling_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(rig: Rig) -> None:
        world = rig.world
        await rig.deploy()
        await rig.reaches(Phase.COMPARING)
        for name in ("shaped", "look"):
            with monkeypatch.context() as wrong:
                wrong.setattr(rig.deployments, name, raise_key_error)
                await rig.until(lambda: "KeyError" in rig.control.trouble)
                world.provider.end("chat-0", world.generation("chat-0"), "was killed by signal 9 (SIGKILL)")
                await rig.until(lambda: world.ready(OLD) == 2)
                await rig.until(lambda: world.ready(OLD) == 3)
                assert "chat-4" in world.alive()
            await rig.until(lambda: not rig.control.trouble)

    run_story(tmp_path, story)


def test_shutdown_does_not_roll_back(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.deploy()
        await rig.reaches(Phase.COMPARING)
        rig.control.stop()
        await rig.task
        assert rig.rollout.phase is Phase.COMPARING

    run_story(tmp_path, story)
