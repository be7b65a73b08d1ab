"""Plans that cannot decide, immediate aborts, assignment to arms, and the end of A/B tests."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.rollout.streams import batch

from forebay.core.rollout.effects import effects
from forebay.core.rollout.guards import Harm, Incident, tripped
from forebay.core.rollout.judging import judge
from forebay.core.rollout.observing import begin, observe
from forebay.core.rollout.planning import Need, Plan, Step, needs, refusal
from forebay.core.rollout.sides import side_of
from forebay.core.rollout.values import Arm, Decision, Rate, Rules, Score, Time

RULES = Rules((Rate("errors"), Time("ttft", both_ways=True), Score("quality", drop=0.05)))
BASELINES = {"errors": 0.001, "ttft": 0.8, "quality": 0.4}
HOUR = 3600.0


def plan(hours: float, share: float = 0.05, requests_per_s: float = 10.0) -> Plan:
    return Plan(requests_per_s, (Step(share, hours * HOUR),))


def test_too_short_plan_is_rejected_with_the_calculation() -> None:
    refused = refusal(RULES, plan(0.5), BASELINES)

    assert refused is not None
    assert {need.metric for need in refused.lacking} == {"errors", "ttft", "quality"}
    assert all(need.samples_had == 900 and need.time_had_s == HOUR / 2 for need in refused.lacking)
    assert all(need.samples_needed > 900 and need.time_needed_s > HOUR / 2 for need in refused.lacking)
    assert "900 canary requests in 1,800 s, but about" in refused.reason


def test_plan_of_the_required_duration_is_accepted() -> None:
    refused = refusal(RULES, plan(0.5), BASELINES)
    assert refused is not None
    hours = max(need.time_needed_s for need in refused.lacking) / HOUR

    assert refusal(RULES, plan(1.001 * hours), BASELINES) is None


def test_undecidable_tolerance_is_reported_as_such() -> None:
    rules = Rules((Rate("errors", ratio=1.0, floor=0.01),))

    refused = refusal(rules, plan(1.0), {"errors": 0.02})

    assert refused is not None
    assert refused.lacking[0].samples_needed == math.inf
    assert "no number of requests suffices" in refused.reason


def test_only_required_metrics_delay_a_plan() -> None:
    rules = Rules((Rate("errors", required=False), Time("ttft", ratio=1.5, tail=0.0)))

    assert refusal(rules, plan(1.0), BASELINES) is None
    with pytest.raises(KeyError):
        refusal(rules, plan(1.0), {"errors": 0.001})


def test_evidence_of_all_plan_steps_adds_up() -> None:
    small, large = Step(0.05, HOUR), Step(0.2, HOUR)
    lone, then = needs(RULES, Plan(10.0, (small,)), BASELINES), needs(RULES, Plan(10.0, (small, large)), BASELINES)

    assert [need.samples_had for need in then] == [1800 + 7200] * len(then)
    assert all(b.time_needed_s <= a.time_needed_s * 1.0001 for a, b in zip(lone, then, strict=True))


@settings(max_examples=50)
@given(st.floats(1.02, 2.0), st.floats(0.1, 2.0), st.floats(0.01, 0.5), st.booleans())
def test_larger_tolerance_never_needs_more_samples(ratio: float, sigma: float, share: float, harm: bool) -> None:
    def needed(more: float) -> dict[str, float]:
        rules = Rules((Time("ttft", ratio=ratio * more, tail_ratio=ratio * more),))
        found: tuple[Need, ...] = needs(rules, plan(1.0, share), {"ttft": sigma})
        return {need.part: need.samples_needed for need in found if need.harm == harm}

    assert all(needed(1.1)[part] <= needed(1.0)[part] * 1.0001 for part in ("centre", "tail"))


def test_steps_without_a_comparison_count_for_nothing() -> None:
    some, all_ = Step(0.05, HOUR), Step(1.0, HOUR)

    assert needs(RULES, Plan(10.0, (some, all_)), BASELINES) == needs(RULES, Plan(10.0, (some,)), BASELINES)
    assert {need.samples_needed for need in needs(RULES, Plan(10.0, (all_,)), BASELINES)} == {math.inf}


def test_error_metric_with_a_zero_baseline_can_be_planned() -> None:
    found = needs(Rules((Rate("errors"),)), plan(1.0), {"errors": 0.0})

    assert all(0 < need.samples_needed < math.inf for need in found)
    assert needs(Rules((Rate("errors", ratio=9.0),)), plan(1.0), {"errors": 0.5})[1].samples_needed < math.inf


def test_predicted_sample_size_is_within_a_factor_of_two() -> None:
    rules, took = Rules((Time("ttft", ratio=1.3, tail=0.0),)), []
    predicted = needs(rules, plan(1.0, 0.2), {"ttft": 0.8})[0].samples_needed
    for seed in range(12):
        state, rng = begin(rules), Random(seed)
        while judge(rules, state).decision is Decision.INCONCLUSIVE:
            state = observe(rules, state, [o for o in batch(rng, 30) if o.metric == "ttft"])
        took.append(state.times["ttft"].canary)

    assert predicted / 2 < sorted(took)[10] < predicted * 2


@pytest.mark.parametrize(
    ("incidents", "answers", "harm"),
    [
        ([], 0, None),
        ([Incident(Harm.CRASH, 50.0)], 0, Harm.CRASH),
        ([Incident(Harm.OUT_OF_MEMORY, 50.0)], 1000, Harm.OUT_OF_MEMORY),
        ([Incident(Harm.CRASH, -900.0)], 0, None),
        ([Incident(Harm.CRASH, 101.0)], 0, None),
        ([Incident(Harm.SERVER_ERROR, 99.0)] * 4, 4, None),
        ([Incident(Harm.SERVER_ERROR, 99.0)] * 5, 10, Harm.SERVER_ERROR),
        ([Incident(Harm.SERVER_ERROR, 99.0)] * 5, 11, None),
        ([Incident(Harm.SERVER_ERROR, 69.0)] * 5, 5, None),
    ],
)
def test_guard_trips_on_enough_incidents_within_its_window(
    incidents: list[Incident], answers: int, harm: Harm | None
) -> None:
    found = tripped(incidents, [90.0] * answers, now=100.0)

    assert (found and found.guard.harm) == harm
    if found:
        assert found.reason.startswith(f"{found.times} x {harm} of the canary within ")


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5])
def test_callers_are_assigned_to_arms_by_the_share(share: float) -> None:
    several = 20000

    found = sum(side_of(f"caller-{index}", "chat@r-2", share) is Arm.CANARY for index in range(several))

    assert found / several == pytest.approx(share, abs=0.01)


@settings(max_examples=50)
@given(st.text(max_size=20), st.text(max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_a_growing_share_moves_no_caller_back_to_stable(caller: str, rollout: str, one: float, other: float) -> None:
    low, high = sorted((one, other))

    assert side_of(caller, rollout, low) is Arm.STABLE or side_of(caller, rollout, high) is Arm.CANARY
    assert side_of(caller, rollout, 0.0) is Arm.STABLE
    assert side_of(caller, rollout, 1.0) is Arm.CANARY


def test_another_rollout_divides_callers_anew() -> None:
    sides = {tuple(side_of(f"{index}", rollout, 0.5) for index in range(64)) for rollout in ("a", "b", "c")}

    assert len(sides) == 3


def test_an_ab_test_ends_with_effects_and_intervals() -> None:
    state, rng = begin(RULES), Random(7)
    for _ in range(60):
        state = observe(RULES, state, batch(rng, 100, share=0.5, latency=1.5, errors=0.1, quality=0.2))
    errors, ttft, quality = effects(RULES, state)

    assert 4 < errors.low < errors.estimate < errors.high
    assert 1.3 < ttft.low < 1.5 < ttft.high < 1.7
    assert -0.3 < quality.low < -0.2 < quality.high < -0.1


def test_effect_interval_is_infinite_with_few_requests() -> None:
    errors, ttft, quality = effects(RULES, begin(RULES))

    assert (errors.low, errors.high) == (0.0, math.inf)
    assert (ttft.low, ttft.high) == (0.0, math.inf)
    assert (quality.low, quality.high) == (-math.inf, math.inf)
