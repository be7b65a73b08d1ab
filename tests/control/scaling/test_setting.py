"""Manual scaling settings, and how they relate to the store and the cluster file."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.control.deploying.rig import SWIFT
from tests.control.deploying.world import World, wait
from tests.control.scaling.rig import HPA, Scaling, controlled, plan_of, play, started

from forebay.control.scaling.state import Document, ScalingState
from forebay.control.scaling.values import ScaleRefused, ScalingRequest
from forebay.core.deploy.rollout import Phase
from forebay.store import events
from forebay.store.documents import Documents
from forebay.store.schema import SCALES

Story = Callable[[Scaling], Awaitable[None]]


def run_story(folder: Path, story: Story, scale: dict[str, object] | None = None, **model: Any) -> None:
    async def test(world: World) -> None:
        async with controlled(world, plan_of(world, scale, **model)) as scaling:
            await scaling.has(1)
            await story(scaling)

    play(folder, test)


def history(world: World) -> list[tuple[str, str, str]]:
    """What the store says has happened to the scaling of `chat`."""
    with world.store.read() as connection:
        found = list(events.since(connection, subject="model/chat"))
    return [(event.kind, event.actor, event.why) for event in found if event.kind.startswith("scale.")]


def test_manual_setting_overrides_load_and_survives_restarts(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        it = await started(world, plan_of(world))
        await it.has(1)
        standing = await it.scaler.set(ScalingRequest("chat", replicas=3, why="a test"), "ann")
        assert standing.setting.replicas == 3
        await it.has(3)
        await it.rig.kill()
        it = await started(world, plan_of(world), it.crowds)
        await wait(30.0)
        assert len(it.slots) == 3
        [standing] = it.scaler.standing("chat")
        assert (standing.setting.by, standing.decisions[-1].reason) == ("ann", "set")
        await it.scaler.set(ScalingRequest("chat"), "bob")
        await it.has(1)
        assert [(kind, actor) for kind, actor, _ in history(world)] == [
            ("scale.set", "ann"),
            ("scale.changed", "control"),
            ("scale.auto", "bob"),
            ("scale.changed", "control"),
        ]
        await it.rig.kill()

    play(tmp_path, test)


@pytest.mark.slow
def test_manual_bounds_override_the_cluster_file(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        await it.scaler.set(ScalingRequest("chat", min=2, max=8), "ann")
        await it.has(2)
        assert it.scaler.bounds("chat") == (2, 8)
        await it.scaler.set(ScalingRequest("chat"), "ann")
        assert it.scaler.bounds("chat") == (1, 6)

    run_story(tmp_path, story, dict(HPA))


@pytest.mark.parametrize(
    ("hours", "wish", "both"),
    [
        ({"min": 3}, ScalingRequest("chat", max=9), (3, 9)),
        ({"min": 3}, ScalingRequest("chat", max=2), (2, 2)),
        ({"min": 3}, ScalingRequest("chat", min=2), (2, 6)),
        ({"max": 4}, ScalingRequest("chat", min=2), (2, 4)),
        ({"max": 4}, ScalingRequest("chat", min=5), (5, 5)),
        ({"max": 4}, ScalingRequest("chat", max=5), (1, 5)),
        ({"min": 2, "max": 3}, ScalingRequest("chat", min=1, max=5), (1, 5)),
    ],
)
def test_unset_bound_comes_from_the_schedule(
    tmp_path: Path, hours: dict[str, int], wish: ScalingRequest, both: tuple[int, int]
) -> None:
    async def test(world: World) -> None:
        async with controlled(world, plan_of(world, {**HPA, "schedule": [hours]})) as it:
            await it.has(hours.get("min", 1))
            await it.scaler.set(wish, "ann")
            assert it.scaler.bounds("chat") == both

    play(tmp_path, test)


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (ScalingRequest("other", 1), "there is no model other; there is: chat"),
        (ScalingRequest("chat", 7), "7 replicas are outside 1 to 6"),
        (ScalingRequest("chat", 0), "0 replicas are outside 1 to 6"),
        (ScalingRequest("chat", min=7), "min would be 7, and max 6"),
        (ScalingRequest("chat", max=0), "min would be 1, and max 0"),
    ],
)
def test_invalid_scaling_request_is_rejected(tmp_path: Path, wish: ScalingRequest, text: str) -> None:
    async def story(it: Scaling) -> None:
        with pytest.raises(ScaleRefused, match=text):
            await it.scaler.set(wish, "ann")

    run_story(tmp_path, story, dict(HPA))


def test_model_without_scale_accepts_replicas_but_no_bounds(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        with pytest.raises(ScaleRefused, match="has no `scale`"):
            await it.scaler.set(ScalingRequest("chat", max=4), "ann")
        with pytest.raises(ScaleRefused, match="at least 1"):
            await it.scaler.set(ScalingRequest("chat", 0), "ann")
        await it.scaler.set(ScalingRequest("chat", 2), "ann")
        await it.has(2)
        await it.scaler.set(ScalingRequest("chat"), "ann")
        await it.has(1)
        [standing] = it.scaler.standing()
        assert (standing.scale, standing.min, standing.wanted) == (None, None, 1)

    run_story(tmp_path, story)


def test_shadow_mode_reports_decisions_without_scaling(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        it.crowd.load = 8.0
        await it.rig.until(lambda: it.scaler.standing()[0].wanted == 4, 120.0)
        await wait(20.0)
        assert it.slots == ["chat-0"]
        assert it.kinds == ["scale.would_change"]
        assert not it.scaler.standing()[0].decisions[-1].done
        assert not it.rig.world.routes.on_demand

    run_story(tmp_path, story, {**HPA, "shadow": True, "min": 0})


@pytest.mark.slow
def test_changed_bounds_keep_running_replicas(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        world = it.rig.world
        it.crowd.load = 8.0
        await it.has(4)
        it.rig.control.take_over(plan_of(world, {**HPA, "max": 2}), None)
        await it.has(2)
        it.rig.control.take_over(plan_of(world, None, replicas=3), None)
        await it.has(3)
        assert it.scaler.bounds("chat") is None
        assert world.provider.placed["chat-0"] == 1

    run_story(tmp_path, story, dict(HPA))


@pytest.mark.slow
def test_rollout_in_progress_allows_only_scale_up(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        world, rig = it.rig.world, it.rig
        it.crowd.load = 4.0
        await it.has(2)
        await rig.deploy(course=replace(SWIFT, settle_s=400.0))
        it.crowd.load = 8.0
        await rig.until(lambda: len(rig.control.plan.models[0].slots) == 4, 120.0)
        it.crowd.load = 0.0
        await rig.reaches(Phase.SETTLING, 300.0)
        await wait(350.0)
        assert len(rig.control.plan.models[0].slots) == 4
        assert it.scaler.standing()[0].decisions[-1].reason == "wait"
        await rig.reaches(Phase.PROMOTED)
        await it.has(1)
        assert world.provider.placed["chat-0"] == 1

    run_story(tmp_path, story, dict(HPA))


@pytest.mark.slow
@pytest.mark.parametrize("recalled", [True, False])
def test_store_outage_at_startup_prevents_scale_down(tmp_path: Path, recalled: bool) -> None:
    async def test(world: World) -> None:
        async with controlled(world, plan_of(world)) as it:
            await it.has(1)
            await it.scaler.set(ScalingRequest("chat", 4), "ann")
            await it.has(4)
        if not recalled:
            (tmp_path / "scaling.json").unlink()
        async with controlled(world, plan_of(world), it.crowds, store_down="gone") as it:
            await wait(400.0)
            assert len(it.slots) == 4
            assert it.scaler.trouble == "gone"
            assert (it.scaler.standing()[0].setting.replicas == 4) is recalled
            world.store.down = ""  # type: ignore[attr-defined]
            await it.rig.until(lambda: it.scaler.standing()[0].setting.replicas == 4, 30.0)
            assert world.provider.placed["chat-3"] == 1

    play(tmp_path, test)


@pytest.mark.slow
def test_lost_commit_response_records_no_second_event(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        world = it.rig.world
        world.store.loses_answer = True  # type: ignore[attr-defined]
        await it.scaler.set(ScalingRequest("chat", 2), "ann")
        await it.has(2)
        await wait(30.0)
        assert [actor for _, actor, _ in history(world)] == ["ann", "control"]

    run_story(tmp_path, story, dict(HPA))


def test_incompatible_stored_state_keeps_only_manual_settings() -> None:
    it = ScalingState("chat")
    it.take('{"setting": {"replicas": 3}, "memory": {"changes": 7}, "wanted": 3}')
    assert (it.setting.replicas, it.wanted, it.autoscaler) == (3, 3, ScalingState("x").autoscaler)
    it.take("no json")
    assert it.setting.replicas == 3
    again = ScalingState("chat")
    again.take(it.text())
    assert again.text() == it.text()
    assert msgspec.json.decode(it.text(), type=Document).wanted == 3


def test_a_missing_store_is_empty_and_is_not_created(tmp_path: Path) -> None:
    def never() -> None:
        raise AssertionError

    scales = Documents(SCALES, never, "test", lambda: False)  # type: ignore[arg-type] # never asked
    assert scales.known() == {}
    scales.close()
