"""Descriptions of cluster file changes that affect scaling."""

from typing import Any

import pytest
from tests.control.test_changes import CHAT, SMALL, chat, cluster, plan

from forebay.control.changes import effects

SCALED = {"scale": {"max": 4}}


@pytest.mark.parametrize(
    ("before", "after", "done"),
    [
        ({}, SCALED, ["chat: is scaled between 1 and 4 replicas, by forebay"]),
        (SCALED, {}, ["chat: is no longer scaled: 2 replicas from now on"]),
        (
            SCALED,
            {"scale": {"max": 4, "shadow": True}},
            ["chat: would be scaled between 1 and 4 replicas, by forebay"],
        ),
        (SCALED, {"scale": {"max": 4}, "replicas": 3}, []),
        (
            SCALED,
            {"scale": {"max": 4}, "engine": {"name": "synthetic", "step_ms": 5}},
            ["chat: its replicas are replaced, one after the other"],
        ),
    ],
)
def test_scaling_changes_are_described(before: dict[str, Any], after: dict[str, Any], done: list[str]) -> None:
    assert list(effects(plan(cluster(**chat(**before))), plan(cluster(**chat(**after))))) == done


def test_a_new_model_without_replicas_starts_on_demand() -> None:
    late = {**CHAT, "name": "late", "replicas": 0, "scale": {"min": 0, "max": 2}}
    added = cluster(models=[CHAT, SMALL, late])
    assert effects(plan(cluster()), plan(added)) == ("late: starts on the first request",)
