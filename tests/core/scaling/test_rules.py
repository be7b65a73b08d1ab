"""Scaling rules of other systems, against values calculated by hand from their formulas."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.scaling.rules import apa, hpa, kpa, slo
from forebay.core.scaling.rules.behaviour import DEFAULT, Behaviour, Limit, Past, held
from forebay.core.scaling.rules.table import Rules, advise
from forebay.core.scaling.rules.window import Sample, added, mean
from forebay.core.scaling.settings import Policy, Scale
from forebay.core.scaling.values import Reading


def reading(at: float, **more: float | None) -> Reading:
    """Of five seconds in which nothing came."""
    figures: dict[str, float | None] = {
        "ready": 2, "pending": 0, "arrivals": 0, "prompt_tokens": 0, "completions": 0, "output_tokens": 0,
        "refused": 0, "waiting": 0, "in_flight": 0.0, "backlog_tokens": 0, **more,
    }  # fmt: skip
    return Reading(at=at, since_s=5.0, **figures)  # type: ignore[arg-type]


def test_window_mean_weights_samples_by_their_duration() -> None:
    samples = added(added((), Sample(10.0, 10.0, 4.0), 60.0), Sample(15.0, 5.0, 1.0), 60.0)
    assert mean(samples, 15.0, 60.0) == pytest.approx(3.0)
    assert mean(samples, 15.0, 7.5) == pytest.approx((2.5 * 4 + 5 * 1) / 7.5)
    assert mean(samples, 90.0, 60.0) == 0.0
    assert added(samples, Sample(75.0, 5.0, 2.0), 60.0) == (Sample(75.0, 5.0, 2.0),)


@pytest.mark.parametrize(
    ("value", "ready", "pending", "current", "expected"),
    [
        (9.0, 4, 0, 4, 6),  # 4 · 1.5
        (6.5, 4, 0, 4, 4),  # 8 % over: within the tolerance
        (6.7, 10, 0, 10, 12),  # 10 · 1.117
        (3.0, 4, 0, 4, 2),
        (0.0, 4, 0, 4, 0),
        (9.0, 4, 2, 6, 6),  # with two idle ones the ratio is 1
        (12.0, 4, 2, 6, 8),  # 6 · 8/6
        (3.0, 4, 2, 6, 2),  # those that start do not count on the way down
        (9.0, 0, 3, 3, 3),
    ],
)
def test_hpa_wants_the_documented_ratio(value: float, ready: int, pending: int, current: int, expected: int) -> None:
    assert hpa.wanted(value, 6.0, ready, pending, current) == expected


def test_hpa_evaluates_every_fifteen_seconds_and_scales_in_after_five_minutes() -> None:
    state, current, said = hpa.State(), 8, []
    for second in range(0, 640, 5):
        now = 1000.0 + second
        value = 8.0 if second < 30 else 4.0
        many, state = hpa.step(state, value=value, target=8.0, ready=8, pending=0, current=current, now=now)
        said.append(many)
    assert said[: said.index(4)] == [8] * 63  # the last look at 8 was after 15 s; 300 s later it is forgotten
    assert set(said[63:]) == {4}


def test_hpa_behaviour_at_most_doubles_or_adds_four_per_fifteen_seconds() -> None:
    many, past = held(DEFAULT, Past(), 50, 3, 0.0)
    assert many == 7
    many, past = held(DEFAULT, past, 50, 7, 5.0)
    assert many == 7
    many, _ = held(DEFAULT, past, 50, 7, 21.0)
    assert many == 14


def test_stabilisation_window_uses_the_lowest_wish_up_and_the_highest_down() -> None:
    behaviour = Behaviour(30.0, 60.0, (Limit(0, 9.0, 15.0),), (Limit(1, 0.0, 120.0),))
    past, said = Past(), []
    for at, wish in [(0.0, 5), (10.0, 9), (35.0, 9), (41.0, 9)]:
        many, past = held(behaviour, past, wish, 5, at)
        said.append(many)
    assert said == [5, 5, 9, 9]
    for at, wish, current in [(50.0, 1, 9), (112.0, 1, 9), (120.0, 1, 8), (240.0, 1, 8)]:
        many, past = held(behaviour, past, wish, current, at)
        said.append(many)
    assert said[4:] == [9, 8, 8, 7]


@pytest.mark.parametrize(
    ("total", "ready", "expected"),
    [(70.0, 1, 10), (71.0, 1, 11), (7.0, 8, 4), (0.0, 1, 0), (0.0, 0, 0), (7.0, 0, 1)],
)
def test_kpa_divides_concurrency_by_seven_tenths_of_the_target_and_halves_at_most(
    total: float, ready: int, expected: int
) -> None:
    state, many = kpa.State(), -1
    for now in range(5, 300, 5):
        many, state = kpa.step(state, total=total, target=10.0, since_s=5.0, ready=ready, now=float(now))
    assert many == expected


def test_kpa_panics_at_twice_its_size_and_does_not_scale_in_for_a_minute() -> None:
    state, said = kpa.State(), []
    for now in range(5, 205, 5):
        total = 70.0 if now == 65 else 7.0
        many, state = kpa.step(state, total=total, target=10.0, since_s=5.0, ready=2, now=float(now))
        said.append(many)
    assert said[:12] == [1] * 12
    peak = max(said)
    assert peak == math.ceil((5 * 70 + 1 * 7) / 6 / 7)
    first = said.index(peak)
    assert said[first : first + 13] == [peak] * 13  # a minute, and the tick that still has it in its six seconds
    assert said[-1] == 1


@pytest.mark.parametrize(
    ("use", "target", "ready", "current", "expected"),
    [
        (11.0, 10.0, 4, 4, 4),  # 10 % over
        (12.0, 10.0, 4, 4, 5),
        (30.0, 10.0, 4, 4, 8),  # the double at most
        (8.0, 10.0, 4, 6, 6),  # 20 % under: as it is, with those that start
        (7.0, 10.0, 4, 4, 3),
        (1.0, 10.0, 5, 5, 2),  # the half at most
    ],
)
def test_apa_has_two_tolerances_and_two_rates(
    use: float, target: float, ready: int, current: int, expected: int
) -> None:
    assert apa.wanted(use, target, ready, current) == expected


def test_apa_uses_the_mean_of_a_minute() -> None:
    state, many = apa.State(), -1
    for now, value in [(30.0, 10.0), (60.0, 20.0)]:
        many, state = apa.step(state, value=value, target=10.0, since_s=30.0, ready=4, current=4, now=now)
    assert many == 6


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "expected"),
    [(None, None, 0.0), (1.0, None, 0.2), (1.0, 0.04, 0.4), (5.0, 0.04, 1.0), (50.0, 0.04, 2.0)],
)
def test_slo_score_is_the_worse_latency_as_a_share_of_its_objective(
    ttft_s: float | None, tpot_s: float | None, expected: float
) -> None:
    assert slo.score(ttft_s, tpot_s, 5.0, 0.1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("score", "ready", "current", "expected"),
    [
        (0.5, 10, 10, 10),
        (0.55, 10, 10, 10),
        (0.66, 10, 10, 12),
        (1.1, 5, 10, 10),  # half of them are still to come: as if they were there
        (1.09, 8, 10, 16),
        (0.6, 5, 10, 10),
        (0.6, 0, 10, 11),
        (0.4, 10, 10, 10),
        (0.3, 10, 10, 8),  # 10 - ⌊2.5⌋
        (0.0, 10, 10, 0),
    ],
)
def test_slo_policy_scales_outside_of_two_thresholds(score: float, ready: int, current: int, expected: int) -> None:
    assert slo.wanted(score, ready, current) == expected


def test_slo_policy_removes_one_replica_in_two_minutes() -> None:
    state, current, changed_at = slo.State(), 6, []
    for now in range(5, 600, 5):
        many, state = slo.step(state, raw=0.1, since_s=5.0, ready=current, current=current, now=float(now))
        if many != current:
            changed_at.append(now)
            current = many
    assert changed_at == [5, 130, 255, 380, 505]
    assert current == 1


def test_every_rule_is_found_by_name_and_gives_a_reason() -> None:
    rules = Rules()
    for policy in (Policy.HPA, Policy.KPA, Policy.APA, Policy.SLO):
        scale = Scale(8, policy=policy, target=10.0, ttft_s=5.0, tpot_s=0.1)
        many, why, rules = advise(scale, rules, reading(100.0, tpot_s=0.11, in_flight=40.0), 20.0, 2)
        assert many > 2, policy
        assert why.startswith(f"{policy} says {many}: "), why
    assert Rules() not in {rules}
    with pytest.raises(ValueError, match="not a rule"):
        advise(Scale(8), rules, reading(100.0), 0.0, 2)


def test_kpa_reason_mentions_panic() -> None:
    scale = Scale(8, policy=Policy.KPA, target=1.0)
    why = advise(scale, Rules(), reading(100.0), 50.0, 2)[1]
    assert why.endswith("concurrency is 50 per ready replica, target 0.7, in panic")


@given(st.integers(1, 40), st.floats(0.0, 500.0), st.floats(0.1, 100.0), st.integers(0, 10))
def test_rules_never_want_fewer_replicas_for_more_load(ready: int, value: float, more: float, pending: int) -> None:
    current = ready + pending
    high = value + more
    assert hpa.wanted(high, 10.0, ready, pending, current) >= min(
        hpa.wanted(value, 10.0, ready, pending, current), current
    )
    assert slo.wanted(high / 250, ready, current) >= slo.wanted(value / 250, ready, current)
    results = []
    for total in (value, high):
        state, many = kpa.State(), -1
        for now in (5.0, 10.0, 15.0):
            many, state = kpa.step(state, total=total, target=10.0, since_s=5.0, ready=ready, now=now)
        results.append(many)
    assert results[0] <= results[1]
