"""`limits` of the cluster file: models share the capacity, and decisions name who has it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.control.deploying.world import World, artifact, wait
from tests.control.scaling.rig import controlled, plan_of, play

from forebay.control.plan import Places, Plan, PlannedModel, make_plan
from forebay.control.scaling.limiting import Decided, Limiter, Share, claim_of
from forebay.control.scaling.state import ScalingState
from forebay.control.scaling.values import LimitUse, ScaleRefused, ScalingRequest
from forebay.control.standby.standby import Standby
from forebay.core.cluster import Cluster
from forebay.core.scaling.sharing import GPU, Claim, Limits
from forebay.obs.metrics import Metrics

FIXED: Mapping[str, object] = {"scale": None, "replicas": 2}
EIGHT = Limits(8 * GPU)


def decided(asked: int, least: int = 1, *, held: bool = False, shadow: bool = False) -> Decided:
    return Decided(asked, "load", "", {}, least, held=held, shadow=shadow)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    both = {"task": "chat", "source": "x", "engine": "synthetic", "standby": 1}
    chat = {"name": "chat", "scale": {"max": 9, "weight": 3.0}, "placement": {"gpus": 2, "fraction": 0.5}}
    other = {"name": "other", "replicas": 2, "placement": {"low_priority": True}}
    cluster = Cluster.model_validate({"models": [both | chat, both | other]})
    return make_plan(cluster, {name: artifact("old") for name in ("chat", "other")}, Places(tmp_path), "0")


@pytest.fixture
def models(plan: Plan) -> dict[str, PlannedModel]:
    return {model.routes.name: model for model in plan.models}


def test_standby_count_is_taken_from_the_pool(plan: Plan) -> None:
    standby = Standby(Metrics(), lambda *_, **__: None)
    assert standby.pools == {}
    standby.pooled(plan)

    assert standby.pools == {"chat": 1, "other": 1}


def test_claim_includes_decision_and_standby_replicas(models: dict[str, PlannedModel]) -> None:
    chat, it = models["chat"], ScalingState("chat")

    assert claim_of(it, chat, decided(5), 0) == Claim("chat", 6, 2, gpus=GPU, weight=3.0)
    it.wanted = 4
    assert claim_of(it, chat, decided(5, held=True), 2) == Claim("chat", 7, 3, 6, 6, GPU, 3.0)
    assert claim_of(it, chat, decided(5, shadow=True), 0) == Claim("chat", 2, 2, gpus=GPU, weight=3.0)
    assert claim_of(ScalingState("other"), models["other"], None, 0) == Claim("other", 3, 3, low=True)


def test_shares_exclude_standby_replicas() -> None:
    limiter = Limiter()
    claims = [Claim("a", 7, 2, gpus=GPU), Claim("b", 9, 1, gpus=GPU), Claim("fixed", 1, 1, gpus=GPU)]

    assert limiter.uses == ()
    shares = limiter.share(EIGHT, claims, {"a": 5, "b": 9})

    assert shares == {
        "a": Share(2, "all 8 of `limits.gpus` are used: a 4, b 3, fixed 1"),
        "b": Share(3, "all 8 of `limits.gpus` are used: a 4, b 3, fixed 1"),
    }
    assert limiter.share(EIGHT, claims, {"a": 5, "b": 9}) == shares
    assert limiter.uses == (LimitUse("gpus", 8.0, 8.0),)
    assert limiter.share(Limits(), claims, {"a": 5, "b": 9}) == {"a": Share(5), "b": Share(9)}


def test_setting_beyond_the_limit_minus_other_minimums_is_rejected() -> None:
    limiter = Limiter()
    mine = Claim("a", 6, 6, gpus=GPU)
    limiter.check(mine, "replicas")  # nothing is known yet
    limiter.share(EIGHT, [Claim("a", 7, 2, gpus=GPU), Claim("b", 9, 3, gpus=GPU)], {})

    limiter.check(mine._replace(least=5), "replicas")
    with pytest.raises(ScaleRefused, match=r"room for 5 of 6 replicas: all 8 of `limits.gpus` are used: a 5, b 3"):
        limiter.check(mine, "replicas")
    limiter.share(EIGHT, [Claim("a", 9, 9, gpus=GPU), Claim("b", 9, 3, gpus=GPU)], {})
    limiter.check(mine._replace(least=8), "min")


def test_limited_scale_up_leaves_other_models_their_replicas(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with controlled(world, plan_of(world, others=[FIXED], limits={"replicas": 4})) as it:
            await it.rig.until(lambda: "chat-0" in it.slots)
            it.crowd.load = 4.0
            await it.rig.until(lambda: "chat-1" in it.slots)
            it.crowd.load = 40.0
            await it.rig.until(lambda: "scale.limited" in it.kinds)
            await wait(60.0)
            assert it.slots == ["chat-0", "chat-1", "other-0", "other-1"]
            last = it.scaler.standing("chat")[0].decisions[-1]
            assert (last.wanted, last.reason, last.figures["asked"]) == (2, "limit", 6)
            assert last.why.endswith("6 would do, but all 4 of `limits.replicas` are used: chat 2, other 2")
            assert it.kinds.count("scale.limited") == 1
            assert it.scaler.limits == (LimitUse("replicas", 4.0, 4.0),)
            text = it.rig.metrics.render().decode()
            assert 'forebay_scale_wanted{model="chat"} 2.0' in text
            assert 'forebay_scale_asked{model="chat"} 6.0' in text
            with pytest.raises(ScaleRefused, match="room for 2 of 3 replicas"):
                await it.scaler.set(ScalingRequest("chat", replicas=3), "ann")
            with pytest.raises(ScaleRefused, match="room for 2 of 3 replicas"):
                await it.scaler.set(ScalingRequest("chat", min=3), "ann")
            await it.scaler.set(ScalingRequest("chat", replicas=2), "ann")
            it.rig.control.take_over(plan_of(world, limits={"replicas": 4}), None)
            await it.rig.until(lambda: not it.scaler.standing("other"))
            await it.scaler.set(ScalingRequest("chat", replicas=3), "ann")
            await it.has(3)

    play(tmp_path, test)


@pytest.mark.slow
def test_a_model_with_unknown_load_loses_no_replica_to_others(tmp_path: Path) -> None:
    """No gateway says anything of the model `other`."""

    async def test(world: World) -> None:
        async with controlled(world, plan_of(world, others=[{"replicas": 3}], limits={"replicas": 5})) as it:
            it.crowd.load = 40.0
            await it.rig.until(lambda: "chat-1" in it.slots)
            await wait(300.0)
            assert it.slots == ["chat-0", "chat-1", "other-0", "other-1", "other-2"]
            assert it.scaler.standing("other")[0].decisions[-1].reason == "unknown"

    play(tmp_path, test)


@pytest.mark.slow
def test_changed_limits_apply_immediately(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with controlled(world, plan_of(world, limits={"replicas": 2})) as it:
            it.crowd.load = 8.0
            await it.has(2)
            it.rig.control.take_over(plan_of(world, limits={"replicas": 3}), None)
            await it.has(3)
            it.rig.control.take_over(plan_of(world), None)
            await it.has(4)
            it.rig.control.take_over(plan_of(world, limits={"replicas": 1}), None)
            await it.has(1)

    play(tmp_path, test)
