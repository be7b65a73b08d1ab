"""Differences between two cluster files, and the described effects."""

from pathlib import Path
from typing import Any

import pytest

from forebay.control.changes import VALUE_CHARS_MAX, changes, effects
from forebay.control.plan import Artifact, Places, Plan, make_plan
from forebay.core.cluster import Cluster

CHAT: dict[str, Any] = {"name": "chat", "task": "chat", "source": "x", "engine": "synthetic", "replicas": 2}
SMALL = {**CHAT, "name": "small", "replicas": 1}
BASE: dict[str, Any] = {"models": [CHAT, SMALL], "aliases": {"best": "chat"}}


def cluster(**more: Any) -> Cluster:
    return Cluster.model_validate({**BASE, **more})


def plan(made: Cluster) -> Plan:
    artifacts = {
        model.name: Artifact(Path("x"), "d", "synthetic", model.engine.model_dump() if model.engine else {})
        for model in made.models
    }
    return make_plan(made, artifacts, Places(Path("/run")), "1")


def chat(**more: Any) -> dict[str, Any]:
    return {"models": [{**CHAT, **more}, SMALL]}


ROUTES = "the gateways apply it within a second"
MOVES = "replicas that may no longer run where they are move, one per model at a time; the rest stays"
SHARES = "the limits of GPUs or replicas for all models change; replicas over them are removed"
NODE_A = '{"name":"a","host":"127.0.0.1","launcher":[],"cpus":null,"memory_gib":null,"gpu…'


@pytest.mark.parametrize(
    ("more", "changed", "done"),
    [
        ({}, [], []),
        ({"models": [SMALL, CHAT]}, [], []),
        (chat(routing="round_robin"), ['models.chat.routing: "cpr" → "round_robin"'], [ROUTES]),
        (chat(hedge_after_s=0.5), ["models.chat.hedge_after_s: null → 0.5"], [ROUTES]),
        (
            {"aliases": {"top": "chat"}},
            ['aliases.top: nothing → "chat"', 'aliases.best: "chat" → nothing'],
            [ROUTES],
        ),
        (chat(slo={"availability": 0.9}), ["models.chat.slo.availability: null → 0.9"], []),
        (chat(replicas=4), ["models.chat.replicas: 2 → 4"], ["chat: 2 replicas more"]),
        (chat(placement={"cpus": 1}), ["models.chat.placement.cpus: 0 → 1"], [MOVES]),
        ({"nodes": [{"name": "a"}]}, [f"nodes.a: nothing → {NODE_A}"], [MOVES]),
        ({"limits": {"gpus": 4}}, ["limits.gpus: null → 4"], [SHARES]),
        (
            chat(replicas=1),
            ["models.chat.replicas: 2 → 1"],
            ["chat: 1 replica less; requests in flight there may finish"],
        ),
        (
            chat(engine={"name": "synthetic", "step_ms": 5}),
            ["models.chat.engine.step_ms: 1.0 → 5.0"],
            ["chat: 2 replicas are replaced, one after the other; a spare stands in"],
        ),
        (
            {"models": [CHAT, {**SMALL, "drain_grace_s": 1}]},
            ["models.small.drain_grace_s: 30.0 → 1.0"],
            ["small: its replica is replaced; requests wait until the new one is ready"],
        ),
        (
            {"gateway": {"processes": 2, "retries_max": 1}},
            ["gateway.processes: 1 → 2", "gateway.retries_max: 3 → 1"],
            ["gateway-0: is replaced", "gateway-1: starts"],
        ),
    ],
)
def test_changes_show_both_values_and_their_effects(
    more: dict[str, Any], changed: list[str], done: list[str]
) -> None:
    before, after = cluster(), cluster(**more)

    assert [str(change) for change in changes(before, after)] == changed
    assert list(effects(plan(before), plan(after))) == done


@pytest.mark.parametrize(
    ("replicas", "effect"),
    [
        (1, "its replica is replaced; the standby stands in"),
        (2, "2 replicas are replaced, one after the other; the standby stands in"),
    ],
)
def test_standby_replica_stands_in_while_others_are_replaced(replicas: int, effect: str) -> None:
    model = {**CHAT, "replicas": replicas, "standby": 1}
    before, after = cluster(models=[model]), cluster(models=[{**model, "drain_grace_s": 1}])

    assert effects(plan(before), plan(after)) == (f"chat: {effect}",)


def test_removed_models_and_gateways_are_named_and_long_values_truncated() -> None:
    before, after = cluster(gateway={"processes": 2}), cluster(models=[CHAT])

    [processes, small] = changes(before, after)
    assert str(processes) == "gateway.processes: 2 → 1"
    assert (small.path, small.after, len(small.before)) == ("models.small", "nothing", VALUE_CHARS_MAX)
    assert effects(plan(before), plan(after)) == (
        "gateway-1: finishes its requests and stops",
        "small: is no longer served; requests in flight may finish",
    )
    assert effects(plan(after), plan(before))[-1] == "small: 1 replica starts"


def test_adding_an_engine_is_one_change() -> None:
    before = cluster(models=[{**CHAT, "engine": None}])

    [engine] = changes(before, cluster(models=[{**CHAT, "engine": "llamacpp"}]))
    assert (engine.path, engine.before) == ("models.chat.engine", "null")
