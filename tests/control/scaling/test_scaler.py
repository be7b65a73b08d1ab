"""The scaler as a whole: replicas follow the load, whatever else happens."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.control.deploying.world import World, wait
from tests.control.scaling.rig import HPA, Scaling, controlled, plan_of, play, started

Story = Callable[[Scaling], Awaitable[None]]


def run_story(folder: Path, story: Story, scale: dict[str, object] | None = None, **model: Any) -> None:
    """Run a story on a cluster that is ready."""

    async def test(world: World) -> None:
        async with controlled(world, plan_of(world, {**HPA, **(scale or {})}, **model)) as scaling:
            await story(scaling)

    play(folder, test)


@pytest.mark.slow
def test_replicas_follow_the_load_with_recorded_decisions(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        await it.has(1)
        it.crowd.load = 8.0
        await it.has(4)
        assert it.slots == ["chat-0", "chat-1", "chat-2", "chat-3"]
        [standing] = it.scaler.standing()
        assert (standing.wanted, standing.min, standing.max) == (4, 1, 6)
        assert standing.cold_start_s is not None
        it.crowd.load = 100.0
        await it.has(6)
        it.crowd.load = 2.0
        await it.has(1)
        assert it.kinds[0] == "scale.changed"
        wanted = [move.wanted for move in it.scaler.standing()[0].decisions if move.wanted != move.before]
        assert wanted[-1] == 1
        assert max(wanted) == 6

    run_story(tmp_path, story)


def test_predicted_ttft_rule_scales_up_and_holds_while_predictions_are_missing(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        await it.has(1)
        it.crowd.load, it.crowd.predicted_ttft_s = 1.0, 1.5
        await it.has(3)
        it.crowd.predicted_ttft_s = None  # as of a gateway that is older, or has learned nothing yet
        await wait(400.0)
        assert len(it.slots) == 3
        last = it.scaler.standing()[0].decisions[-1]
        assert (last.reason, last.why) == ("unknown", "predicted_ttft_s is not known: no replica is removed")
        it.crowd.predicted_ttft_s = 0.1
        await it.has(1)
        assert it.scaler.standing()[0].decisions[-1].figures["predicted_ttft_s"] == 0.1

    run_story(tmp_path, story, {"max": 3, "signal": "predicted_ttft_s", "target": 1.0})


@pytest.mark.parametrize(
    ("placement", "several", "each"), [({"gpus": 2}, 2, 2.0), ({"gpus": 1, "fraction": 0.5}, 6, 8 / 3)]
)
def test_requests_per_gpu_rule_counts_gpus_per_replica(
    tmp_path: Path, placement: dict[str, object], several: int, each: float
) -> None:
    async def story(it: Scaling) -> None:
        it.crowd.load = 8.0
        await it.has(several)
        await wait(5.0)
        assert it.scaler.standing()[0].decisions[-1].figures["requests_per_gpu"] == pytest.approx(each, rel=0.01)

    run_story(tmp_path, story, {"signal": "requests_per_gpu"}, placement=placement)


def test_idle_model_scales_to_zero_and_back_on_the_first_request(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        await it.has(1)
        await it.has(0)
        assert it.rig.world.routes.on_demand
        assert it.rig.control.plan.models[0].slots == ()
        it.crowd.load = 1.0
        await it.has(1, within_s=5.0)
        assert it.rig.world.routes.start_s >= 1.0

    run_story(tmp_path, story, {"min": 0})


def test_model_can_start_with_zero_replicas(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        await it.has(0)
        await wait(10.0)
        assert it.slots == []

    run_story(tmp_path, story, {"min": 0}, replicas=0)


@pytest.mark.slow
def test_unresponsive_gateway_prevents_scale_down(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with controlled(world, plan_of(world, gateways=2)) as it:
            for crowd in it.crowds.values():
                crowd.load = 4.0
            await it.has(4)
            it.crowds["gateway-0"].silent = True
            it.crowds["gateway-1"].load = 0.0
            it.crowds["gateway-0"].load = 8.0
            await wait(120.0)
            assert len(it.slots) == 4
            assert it.scaler.standing()[0].decisions[-1].reason == "unknown"
            it.crowds["gateway-0"].silent = False
            await wait(60.0)
            assert len(it.slots) == 4

    play(tmp_path, test)


@pytest.mark.slow
def test_restarted_gateway_counts_from_zero(tmp_path: Path) -> None:
    async def story(it: Scaling) -> None:
        it.crowd.load = 4.0
        await it.has(2)
        await wait(30.0)
        it.crowd.restart()
        await wait(60.0)
        assert len(it.slots) == 2

    run_story(tmp_path, story)


def test_scaling_continues_after_control_was_killed(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        it = await started(world, plan_of(world))
        it.crowd.load = 10.0
        await it.has(5)
        await it.rig.kill()
        await wait(30.0)
        again = await started(world, plan_of(world), it.crowds)
        await wait(60.0)
        assert len(again.slots) == 5
        assert again.scaler.standing()[0].decisions[-1].wanted == 5
        assert max(move.wanted for move in again.scaler.standing()[0].decisions) == 5
        assert world.provider.placed["chat-4"] == 1
        await again.rig.kill()

    play(tmp_path, test)


@pytest.mark.slow
def test_scaling_continues_during_a_store_outage(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        store = world.store
        async with controlled(world, plan_of(world)) as it:
            await it.has(1)
            store.down = "gone"  # type: ignore[attr-defined]
            it.crowd.load = 8.0
            await it.has(4)
            assert it.scaler.trouble == "gone"
            store.down = ""  # type: ignore[attr-defined]
            await it.rig.until(lambda: not it.scaler.trouble)

    play(tmp_path, test)


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"scale": None, "replicas": 2}, {"replicas": 2}])
def test_other_models_are_not_scaled(tmp_path: Path, other: dict[str, object]) -> None:
    """Be it that it is not scaled, or that no gateway says anything of it."""

    async def test(world: World) -> None:
        async with controlled(world, plan_of(world, others=[other])) as it:
            it.crowd.load = 8.0
            await it.rig.until(lambda: "chat-3" in it.slots, 120.0)
            it.crowd.load = 0.0
            await it.rig.until(lambda: "chat-1" not in it.slots, 1500.0)
            assert it.slots == ["chat-0", "other-0", "other-1"]
            assert world.provider.placed["other-0"] == world.provider.placed["other-1"] == 1

    play(tmp_path, test)
