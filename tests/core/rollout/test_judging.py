"""Verdicts of rollouts: rollback, promotion, and what is still missing otherwise."""

import math
from random import Random

import pytest
from tests.core.rollout.streams import batch

from forebay.core.rollout import bets, odds, ranks
from forebay.core.rollout.judging import judge
from forebay.core.rollout.observing import begin, observe
from forebay.core.rollout.values import (
    Arm,
    Cell,
    Decision,
    Finding,
    Observation,
    Rate,
    RateState,
    Rules,
    Score,
    ScoreState,
    Shift,
    State,
    Time,
    TimeState,
    Verdict,
)

RULES = Rules((Rate("errors", floor=0.03), Time("ttft", ratio=1.2, tail_ratio=1.5), Score("quality", drop=0.1)))


def verdict_on(requests: int, rules: Rules = RULES, seed: int = 3, **about: float) -> Verdict:
    state, rng = begin(rules), Random(seed)
    for _ in range(requests // 50):
        state = observe(rules, state, batch(rng, 50, **about))
        verdict = judge(rules, state, 1.0)
        if verdict.decision is not Decision.INCONCLUSIVE:
            return verdict
    return judge(rules, state, 1.0)


@pytest.mark.parametrize(
    ("about", "metric", "part"),
    [
        ({"errors": 0.3}, "errors", "rate"),
        ({"latency": 2.5}, "ttft", "centre"),
        ({"quality": 0.4}, "quality", "score"),
    ],
    ids=["errors", "slow", "poor"],
)
def test_harmful_revision_is_rolled_back_with_the_reason(about: dict[str, float], metric: str, part: str) -> None:
    verdict = verdict_on(2000, **about)

    assert verdict.decision is Decision.ROLLBACK
    assert f"{metric} ({part}) is worse than tolerated" in verdict.reason
    assert [p.finding for p in verdict.parts if (p.metric, p.part) == (metric, part)] == [Finding.WORSE]


def test_equally_good_revision_is_promoted() -> None:
    verdict = verdict_on(12000)

    assert verdict.decision is Decision.PROMOTE
    assert {part.finding for part in verdict.parts} == {Finding.FINE}


def test_verdict_without_observations_is_inconclusive_without_an_estimate() -> None:
    verdict = judge(RULES, begin(RULES))

    assert verdict.decision is Decision.INCONCLUSIVE
    assert verdict.needed_samples == verdict.needed_s == math.inf
    assert verdict.reason.endswith("no number of requests would decide")
    assert {part.worse_p for part in verdict.parts} == {part.fine_p for part in verdict.parts} == {1.0}
    assert not any("nan" in part.seen for part in verdict.parts)


def rate_state(worse: float, canary: int = 1000) -> RateState:
    """With log evidence for "worse" by the odds, and canary events that leave no doubt about the floor."""
    logs = tuple(worse * (index > odds.SIDE) for index in range(len(odds.NOTHING)))
    return RateState(logs, Cell(10000, 100, canary, canary // 2))


def of_rates(*worse: float) -> tuple[Rules, State]:
    names = [f"m{index}" for index in range(len(worse))]
    rules = Rules(tuple(Rate(name) for name in names))
    return rules, State({name: rate_state(log) for name, log in zip(names, worse, strict=True)}, {}, {})


@pytest.mark.parametrize(
    ("ps", "worse"),
    [
        ((0.02, 0.9), 1),
        ((0.03, 0.9), 0),
        ((0.02, 0.04), 2),
        ((0.03, 0.04), 0),
        ((0.016, 0.024, 0.9), 2),
        ((0.016, 0.026, 0.9), 1),
    ],
)
def test_holms_correction_decides_how_many_are_worse(ps: tuple[float, ...], worse: int) -> None:
    verdict = judge(*of_rates(*(-math.log(p) for p in ps)))

    assert [part.finding for part in verdict.parts].count(Finding.WORSE) == worse
    assert (verdict.decision is Decision.ROLLBACK) == (worse > 0)


def test_required_samples_follow_from_the_observations() -> None:
    rules, state = of_rates(1.0)

    verdict = judge(rules, state, canary_per_s=0.5)

    assert verdict.parts[0].needed_samples == math.ceil((math.log(20) - 1.0) * 1000)
    assert verdict.needed_samples == verdict.parts[0].needed_samples
    assert verdict.needed_s == 2 * verdict.needed_samples
    assert verdict.reason.endswith(f"about {verdict.needed_samples:,} more canary requests would decide")
    assert judge(rules, state).needed_s == math.inf


def test_sufficient_evidence_of_a_part_needs_no_more_samples() -> None:
    rules = Rules((Rate("errors"), Rate("other")))
    fine = tuple(9.0 * (index < odds.SIDE) for index in range(len(odds.NOTHING)))
    state = State({"errors": RateState(fine, Cell(100, 1, 100, 0)), "other": RateState(odds.NOTHING)}, {}, {})

    errors, other = judge(rules, state).parts

    assert (errors.finding, errors.needed_samples) == (Finding.FINE, 0.0)
    assert (other.finding, other.needed_samples) == (Finding.OPEN, math.inf)


def test_optional_metric_can_only_cause_a_rollback() -> None:
    fine = tuple(9.0 * (index < odds.SIDE) for index in range(len(odds.NOTHING)))
    state = State({"a": RateState(fine, Cell(100, 1, 100, 0)), "b": RateState(odds.NOTHING)}, {}, {})
    harmed = State({**state.rates, "b": rate_state(20.0)}, {}, {})
    rules = Rules((Rate("a"), Rate("b", required=False)))

    assert judge(rules, state).decision is Decision.PROMOTE
    assert judge(rules, harmed).decision is Decision.ROLLBACK


def test_without_a_required_metric_nothing_is_ever_promoted() -> None:
    rules, state = Rules((Rate("a", required=False),)), State({"a": RateState(odds.NOTHING)}, {}, {})

    verdict = judge(rules, state)

    assert (verdict.decision, verdict.needed_samples) == (Decision.INCONCLUSIVE, math.inf)
    assert judge(Rules(()), State({}, {}, {})).decision is Decision.INCONCLUSIVE


def test_too_few_blocks_of_times_give_no_finding() -> None:
    rules = Rules((Time("ttft", both_ways=True),))
    sure = tuple(50.0 * (index >= len(ranks.TILTS)) for index in range(len(ranks.SIGNED)))
    few = TimeState(up=sure, down=sure, tail=odds.NOTHING, blocks=ranks.BLOCKS_MIN - 1, canary=90)
    enough = TimeState(up=sure, down=sure, tail=odds.NOTHING, blocks=ranks.BLOCKS_MIN, canary=90)

    assert judge(rules, State({}, {"ttft": few}, {})).decision is Decision.INCONCLUSIVE
    assert judge(rules, State({}, {"ttft": enough}, {})).decision is Decision.ROLLBACK


def test_two_sided_metric_rejects_much_shorter_and_much_longer_answers() -> None:
    rng = Random(5)
    observations = [
        Observation("length", arm, rng.lognormvariate(4.0, 0.5) * (0.5 if arm is Arm.CANARY else 1.0))
        for _ in range(200)
        for arm in (Arm.STABLE, Arm.STABLE, Arm.CANARY)
    ]
    parts = {}
    for both_ways in (True, False):
        rules = Rules((Time("length", ratio=1.2, tail=0.0, both_ways=both_ways),))
        state = begin(rules)
        for index in range(0, len(observations), 10):
            state = observe(rules, state, observations[index : index + 10])
        parts[both_ways] = [(part.part, part.finding) for part in judge(rules, state).parts]

    assert parts[True] == [("centre", Finding.FINE), ("below", Finding.WORSE)]
    assert parts[False] == [("centre", Finding.FINE)]


def test_score_effect_is_shown_with_its_sign() -> None:
    rules = Rules((Score("quality"),))
    wealth = tuple(40.0 * (index < len(bets.STAKES)) for index in range(len(bets.NOTHING)))
    lost = ScoreState(wealth, 50, shift=Shift().plus(-0.1, 1.0))

    reason = judge(rules, State({}, {}, {"quality": lost})).reason

    assert reason == "quality (score) is worse than tolerated: -0.100, of which -0.02 is tolerated"
