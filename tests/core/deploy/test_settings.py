"""Rollout settings in cluster files and plan files."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.cluster import Cluster
from forebay.core.deploy.course import COURSES, Course, Kind
from forebay.core.deploy.scoring import Scorer, golden_of
from forebay.core.deploy.settings import ROUND_CASES_MAX, GoldenSettings, PlanSettings, RolloutSettings
from forebay.core.rollout.planning import Step
from forebay.core.rollout.values import Rate, Time
from forebay.wire.clusterfile import ClusterFileError, load, load_course

FILE = """
models:
- name: chat
  task: chat
  source: a.gguf
  rollout: {rollout}
- name: large
  task: chat
  source: b.gguf
- name: embed
  task: embed
  source: c
"""


def rollout(section: str) -> RolloutSettings:
    cluster: Cluster = load(FILE.format(rollout=section), "f.yaml")
    return cluster.models[0].rollout


def examples(kind: str) -> list[str]:
    """The blocks of docs/rollouts.md in that language."""
    page = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


def test_rollout_examples_in_the_documentation_are_valid() -> None:
    plan, file = examples("yaml")
    assert load_course(plan, "slow.yaml").steps[-1].share == 0.5
    assert load(file, "forebay.yaml").models[0].rollout.golden == GoldenSettings(file="golden.jsonl")
    (golden,) = examples("json")
    assert golden_of(golden.encode()).problems == ()
    assert {case.scorer for case in golden_of(golden.encode()).cases} == set(Scorer)


def problems(section: str) -> list[str]:
    with pytest.raises(ClusterFileError) as caught:
        rollout(section)
    return [f"{p.path.removeprefix('models[0].rollout.')}: {p.found}" for p in caught.value.problems]


def test_default_plan_settings_equal_the_default_courses() -> None:
    assert RolloutSettings().course() == COURSES[Kind.CANARY]
    assert load_course("", "plan.yaml") == Course()
    for kind in Kind:
        assert RolloutSettings().course(kind) == COURSES[kind] == load_course(f"kind: {kind}", "plan.yaml")


def test_other_rollout_kinds_use_the_times_of_the_configured_plan() -> None:
    settings = rollout("{plan: {steps: [{share: 0.1, time_s: 60}], warm_up_s: 5, no_verdict: rollback}}")
    assert settings.course() == Course(steps=(Step(0.1, 60.0),), warm_up_s=5.0, hold=False)
    assert settings.course(Kind.AB) == Course(Kind.AB, COURSES[Kind.AB].steps, warm_up_s=5.0, hold=False)


def test_plan_is_read_from_json() -> None:
    assert load_course('{"kind": "ab", "steps": [{"share": 0.5, "time_s": 9e4}]}', "plan").steps == (Step(0.5, 9e4),)


def test_tolerances_become_metrics() -> None:
    settings = rollout("{errors: {floor: 0.01}, ttft: {ratio: 1.5, tail: null}, refusals: {required: true}}")
    assert settings.errors.value("errors") == Rate("errors", floor=0.01)
    assert settings.ttft.value("ttft") == Time("ttft", 1.5, 0.0)
    assert settings.refusals.value("refusals") == Rate("refusals")
    assert settings.length.value("length") == Time("length", 1.5, 0.0, both_ways=True, required=False)


def test_all_plan_problems_are_reported_at_once() -> None:
    bad = "{plan: {kind: shadow, steps: [], warm_up_s: -1}, errors: {floor: 2}, judge: chat, similarity: large, x: 1}"
    assert problems(bad) == [
        'judge: "chat"',
        'similarity: "large"',
        "plan.warm_up_s: -1",
        "errors.floor: 2",
        "x: an unknown key",
    ]


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ("steps: []", ["steps: canary with no steps"]),
        ("steps: [{share: 0.5, time_s: 60}, {share: 0.1, time_s: 60}]", ["steps: canary with 0.5, 0.1"]),
        ("kind: shadow, steps: []", ["steps: shadow with no steps"]),
        ("kind: blue-green, steps: [{share: 0.5, time_s: 60}]", ["steps: blue-green with 0.5"]),
        ("steps: [{share: 0.5, time_s: 60}], warm_up_s: 60", ["warm_up_s: 60"]),
    ],
)
def test_conflicting_plan_settings_are_named(plan: str, found: list[str]) -> None:
    assert problems(f"{{plan: {{{plan}}}}}") == [f"plan.{each}" for each in found]
    with pytest.raises(ClusterFileError) as caught:
        load_course(f"{{{plan}}}", "plan.yaml")
    assert [f"{p.path}: {p.found}" for p in caught.value.problems] == found


def test_judge_requires_a_task_with_text_answers() -> None:
    text = FILE.format(rollout="{}").replace(
        "  source: c", "  source: c\n  rollout: {golden: {file: g}, judge: chat}"
    )
    with pytest.raises(ClusterFileError) as caught:
        load(text, "f.yaml")
    assert [p.path for p in caught.value.problems] == ["models[2].rollout.golden", "models[2].rollout.judge"]


@pytest.mark.parametrize("section", ["[]", "{plan: []}", "{judge: [1]}", "{plan: {steps: 3}}", "{golden: x}"])
def test_wrong_types_are_reported_once(section: str) -> None:
    assert len(problems(section)) == 1


@given(st.integers(1, 100_000), st.floats(1, 86_400))
def test_golden_set_rate_is_bounded_by_its_concurrency(cases: int, every_s: float) -> None:
    per_s = GoldenSettings(file="g", every_s=every_s).per_s(cases)
    assert 0 < per_s <= ROUND_CASES_MAX / every_s


def test_plan_settings_default_to_the_course_of_their_kind() -> None:
    assert PlanSettings(kind=Kind.SHADOW).value() == COURSES[Kind.SHADOW]
