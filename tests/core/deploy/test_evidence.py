"""What requests contribute to the evidence of a rollout, and whether its plan is long enough to decide."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.deploy.course import COURSES, Course, Kind
from forebay.core.deploy.evidence import (
    PRIORS,
    Pace,
    baselines,
    fault,
    incidents,
    observations,
    rejected,
    rules_of,
    undecided,
)
from forebay.core.deploy.samples import Sample
from forebay.core.deploy.settings import GoldenSettings, RolloutSettings
from forebay.core.errors import OK, TABLE, Blame, Code
from forebay.core.model import Task
from forebay.core.rollout import Arm, Decision, Harm, Metric, Observation, Rate, Rules, Score, begin, judge, observe
from forebay.core.rollout.planning import Step

ALL = RolloutSettings(golden=GoldenSettings(file="g.jsonl"), judge="large", similarity="embed")
PLAIN = RolloutSettings()
GOOD = Sample("1", Arm.CANARY, 100.0, OK, "256", 0.2, 0.02, 1.0, 40, refused=False, degenerate=False)
CODES = [*Code, OK, "of-another-version"]


def metric(rules: Rules, name: str) -> Metric:
    return next(metric for metric in rules.metrics if metric.name == name)


def names(task: Task, settings: RolloutSettings, kind: Kind) -> list[str]:
    return [metric.name for metric in rules_of(task, settings, kind).metrics]


def test_metrics_depend_on_task_and_kind() -> None:
    live = ["errors", "rejections", "latency"]
    tokens = ["ttft", "tpot", "length", "refusals", "degenerate"]
    assert names(Task.CHAT, PLAIN, Kind.CANARY) == live + tokens
    assert names(Task.CHAT, ALL, Kind.BLUE_GREEN) == [*live, *tokens, "quality"]
    assert names(Task.EMBED, PLAIN, Kind.AB) == names(Task.TENSOR, PLAIN, Kind.CANARY) == live
    assert names(Task.CHAT, PLAIN, Kind.SHADOW) == ["errors", "rejections", "validity"]
    assert names(Task.CHAT, ALL, Kind.SHADOW) == [
        "errors",
        "rejections",
        "validity",
        "agreement",
        "preference",
        "quality",
    ]
    assert names(Task.EMBED, PLAIN, Kind.SHADOW) == ["errors", "rejections", "agreement"]
    assert names(Task.TENSOR, PLAIN, Kind.SHADOW) == ["errors", "rejections"]


@pytest.mark.parametrize("task", Task)
@pytest.mark.parametrize("kind", Kind)
def test_metrics_have_different_names_and_something_is_required(task: Task, kind: Kind) -> None:
    found = names(task, ALL, kind)
    assert len(found) == len(set(found))
    assert any(metric.required for metric in rules_of(task, ALL, kind).metrics)


def test_embeddings_must_agree_more_closely_than_texts() -> None:
    drops = []
    for rules in (ALL, RolloutSettings.model_validate({**ALL.model_dump(), "agreement": {"drop": 0.2}})):
        for task in (Task.CHAT, Task.EMBED):
            found = metric(rules_of(task, rules, Kind.SHADOW), "agreement")
            assert isinstance(found, Score)
            drops.append(found.drop)
    assert drops == [0.3, 0.05, 0.2, 0.2]


def test_latency_is_required_for_promotion_only_of_tasks_without_token_times() -> None:
    assert not metric(rules_of(Task.CHAT, PLAIN, Kind.CANARY), "latency").required
    assert metric(rules_of(Task.EMBED, PLAIN, Kind.CANARY), "latency").required


@pytest.mark.parametrize("code", CODES)
def test_only_replica_errors_count_as_failures(code: str) -> None:
    failed = code != OK and code in set(Code) and TABLE[Code(code)].blame is Blame.MODEL
    assert (fault(code) is True) == (failed or code == Code.INTERNAL)
    assert (fault(code) is False) == (rejected(code) is False) == (code == OK)
    assert not (fault(code) and rejected(code))


def test_successful_answer_yields_every_metric() -> None:
    rules = rules_of(Task.CHAT, PLAIN, Kind.CANARY)
    assert {name: value for name, _, value, _ in observations([GOOD], rules)} == {
        "errors": 0.0,
        "rejections": 0.0,
        "ttft": 0.2,
        "tpot": 0.02,
        "latency": 1.0,
        "length": 40.0,
        "refusals": 0.0,
        "degenerate": 0.0,
    }


def test_failed_request_yields_only_its_failure_and_warm_up_nothing() -> None:
    rules = rules_of(Task.CHAT, PLAIN, Kind.CANARY)
    lost = replace(GOOD, code=Code.REPLICA_LOST)
    assert observations([lost], rules) == [Observation("errors", Arm.CANARY, 1.0, "256")]
    assert observations([replace(GOOD, code=Code.INVALID_REQUEST)], rules) == [
        Observation("rejections", Arm.CANARY, 1.0, "256")
    ]
    assert observations([replace(GOOD, early=True), replace(lost, early=True)], rules) == []


samples = st.builds(
    Sample,
    st.just("1"),
    st.sampled_from(Arm),
    st.floats(0, 1e9),
    st.sampled_from(CODES),
    st.sampled_from(["256", "1024"]),
    st.floats(-1, 1e6),
    st.floats(-1, 1e6),
    st.floats(-1, 1e6),
    st.integers(0, 100_000),
    refused=st.sampled_from([True, False, None]),
    degenerate=st.sampled_from([True, False, None]),
    early=st.booleans(),
)


@settings(max_examples=25)
@given(st.lists(samples, max_size=20), st.sampled_from(Task), st.sampled_from(Kind))
def test_every_observation_of_a_sample_is_valid_for_its_rules(drawn: list[Sample], task: Task, kind: Kind) -> None:
    rules = rules_of(task, ALL, kind)
    found = observations(drawn, rules)
    assert observe(rules, begin(rules), found).ignored == 0
    assert found == [each for sample in drawn for each in observations([sample], rules)]


@settings(max_examples=40)
@given(st.lists(samples, max_size=20))
def test_guards_observe_only_the_canary_including_its_warm_up(drawn: list[Sample]) -> None:
    harm, ends = incidents(drawn)
    canary = [sample for sample in drawn if sample.arm is Arm.CANARY]
    assert all(each.harm is Harm.SERVER_ERROR for each in harm)
    assert [each.at_s for each in harm] == [sample.at for sample in canary if fault(sample.code)]
    assert ends == [sample.at for sample in canary if fault(sample.code) is not None]
    assert incidents([GOOD, replace(GOOD, arm=Arm.STABLE)]) == ([], [GOOD.at])


def test_a_canary_that_fails_is_rolled_back_for_its_errors() -> None:
    rules = rules_of(Task.CHAT, PLAIN, Kind.CANARY)
    state = begin(rules)
    for turn in range(400):
        arm = Arm.CANARY if turn % 4 == 0 else Arm.STABLE
        code = Code.ENGINE_FAILED if arm is Arm.CANARY and turn % 16 == 0 else OK
        state = observe(rules, state, observations([replace(GOOD, arm=arm, code=code)], rules))
    verdict = judge(rules, state)
    assert verdict.decision is Decision.ROLLBACK
    assert verdict.reason.startswith("errors (rate)")


def test_plan_with_too_little_traffic_is_rejected_with_its_assumptions() -> None:
    rules = rules_of(Task.CHAT, PLAIN, Kind.CANARY)
    why = undecided(rules, COURSES[Kind.CANARY], Pace(0.5), None)
    assert why is not None
    assert why.startswith("at 0.5 requests/s: errors (rate): ")
    assert "assumed to vary as usual: errors 0.001, ttft 0.8, tpot 0.3)" in why
    assert undecided(rules, COURSES[Kind.CANARY], Pace(100.0), None) is None


def test_plan_without_traffic_is_rejected() -> None:
    rules = rules_of(Task.CHAT, PLAIN, Kind.CANARY)
    why = undecided(rules, COURSES[Kind.CANARY], Pace(0.0), None)
    assert why is not None
    assert why.startswith("at 0 requests/s: no requests to compare (not observed yet")


@pytest.mark.parametrize("kind", [Kind.BLUE_GREEN, Kind.SHADOW, Kind.AB])
def test_only_canary_plans_must_be_able_to_reach_a_verdict(kind: Kind) -> None:
    assert undecided(rules_of(Task.CHAT, ALL, kind), COURSES[kind], Pace(0.0), None) is None


def test_golden_set_evidence_grows_at_the_rate_of_its_cases() -> None:
    rules = rules_of(Task.CHAT, ALL, Kind.CANARY)
    slow = undecided(rules, COURSES[Kind.CANARY], Pace(100.0, 0.001), None)
    assert slow is not None
    assert slow.startswith("at 0.001 cases/s of the golden set: quality (score): ")
    assert "errors" in (undecided(rules, COURSES[Kind.CANARY], Pace(0.5, 0.001), None) or "").split("golden")[0]
    assert undecided(rules, COURSES[Kind.CANARY], Pace(100.0, 1.0), None) is None


def test_warm_up_of_each_step_does_not_count_as_observation() -> None:
    rules = rules_of(Task.CHAT, PLAIN, Kind.CANARY)
    brief, long = (Course(steps=(Step(0.5, 1000.0),), warm_up_s=warm_up_s) for warm_up_s in (0.0, 990.0))
    assert undecided(rules, brief, Pace(10.0), None) is None
    assert "in 10 s" in (undecided(rules, long, Pace(10.0), None) or "")


def test_baselines_come_from_observations_of_the_stable_arm() -> None:
    rules = rules_of(Task.CHAT, ALL, Kind.CANARY)
    state = begin(rules)
    for turn in range(1200):
        arm = Arm.CANARY if turn % 2 else Arm.STABLE
        code = Code.ENGINE_FAILED if turn % 100 == 0 else OK
        sample = replace(GOOD, arm=arm, code=code, ttft_s=0.1 if turn % 4 < 2 else 0.4)
        quality = [Observation("quality", Arm.CANARY, float(turn % 3 == 0), "golden")] * (turn < 90)
        state = observe(rules, state, [*observations([sample], rules), *quality])
    found, assumed = baselines(rules, state)

    assert found["errors"] == 0.02
    assert found["ttft"] == pytest.approx(0.69, abs=0.1)  # half the logarithm of 4
    assert found["latency"] == 0.05  # which has never differed
    assert found["quality"] == pytest.approx(0.47, abs=0.01)
    assert assumed == ()


@pytest.mark.parametrize("known", [True, False])
def test_baselines_are_assumed_without_enough_observations(known: bool) -> None:
    rules = rules_of(Task.CHAT, ALL, Kind.CANARY)
    others = Rules((Rate("errors"), Score("other")))
    for state in (begin(rules), begin(others)) if known else (None,):
        found, assumed = baselines(rules, state)
        assert assumed == tuple(metric.name for metric in rules.metrics)
        assert found == {name: PRIORS[name] for name in assumed}


@pytest.mark.slow
@pytest.mark.parametrize("finding", ["worse", "fine"])
def test_golden_set_difference_equal_to_the_tolerance_rarely_gets_a_finding(finding: str) -> None:
    """Cases are drawn with replacement, and looked at after each; at most 5 % are promised, and 8 of 60 are rare."""
    rules = Rules((ALL.quality.value("quality"),))
    differences = [-1.0, *[0.0] * 19]  # one of twenty, 5 points
    wrong = 0
    for seed in range(60):
        rng, state = Random(seed), begin(rules)
        for _ in range(600):
            state = observe(rules, state, [Observation("quality", Arm.CANARY, rng.choice(differences), "golden")])
            if judge(rules, state).parts[0].finding == finding:
                wrong += 1
                break
    assert wrong <= 8
