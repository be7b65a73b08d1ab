"""Metrics calculated from the requests of a replay."""

import math

import pytest

from forebay.core.errors import OK
from forebay.sim.engine import Job, Replica, hardware
from forebay.sim.load.values import Arrival
from forebay.sim.replay.outcome import Outcome, Slo, summary

H100 = hardware("h100_sxm", "70B", 4)


def outcome_of(*met: tuple[float, float, int, str]) -> Outcome:
    """Requests with half their prompts cached: seconds to the first token and for each further, tokens, code."""
    outcome = Outcome(len(met))
    for id, (ttft_s, tpot_s, tokens, code) in enumerate(met):
        at = 10.0 * id
        outcome.arrived(id, at, Arrival(at, 100, tokens))
        if code == OK:
            outcome.first_at[id] = at + ttft_s
            outcome.served(id, 0, 50)
        outcome.ended(id, at + ttft_s + tpot_s * (tokens - 1), code)
    outcome.close(100.0, [Replica(H100)])
    return outcome


def test_a_request_is_good_if_it_was_answered_within_both_limits() -> None:
    found = summary(
        outcome_of(
            (1.0, 0.1, 11, OK),
            (1.1, 0.1, 11, OK),
            (1.0, 0.2, 11, OK),
            (0.5, 9.0, 1, OK),
            (0.1, 0.0, 11, "queue_full"),
        ),
        Slo(1.0 + 1e-9, 0.1 + 1e-9),
    )

    assert found.requests == 5
    assert found.goodput == pytest.approx(2 / 5)
    assert found.goodput_per_s == pytest.approx(2 / 100)
    assert found.refused == {"queue_full": 1}
    assert found.ttft_mean_s == pytest.approx(0.9)
    assert found.cache_hit == pytest.approx(0.5)


def test_single_token_answer_has_no_tpot() -> None:
    found = summary(outcome_of((1.0, 0.1, 11, OK), (1.0, 0.3, 11, OK), (1.0, 5.0, 1, OK)), Slo(5.0, 0.2))

    assert found.tpot_s[0] == pytest.approx(0.2)
    assert found.goodput == pytest.approx(2 / 3)


def test_outcome_without_answers_has_no_latencies() -> None:
    found = summary(outcome_of((1.0, 0.1, 5, "cut_off"), (1.0, 0.1, 5, "queue_full")), Slo(5.0, 0.1))

    assert found.goodput == 0.0
    assert math.isnan(found.ttft_mean_s)
    assert all(math.isnan(value) for value in (*found.ttft_s, *found.tpot_s, *found.e2e_s))
    assert found.refused == {"cut_off": 1, "queue_full": 1}
    assert found.imbalance == 1.0


def test_empty_outcome_has_no_goodput() -> None:
    found = summary(outcome_of(), Slo(5.0, 0.1))

    assert found.requests == 0
    assert math.isnan(found.goodput)
    assert found.cache_hit == 0.0


def test_imbalance_is_measured_in_computed_prompt_tokens() -> None:
    engines = [Replica(H100) for _ in range(2)]
    for id, (engine, tokens) in enumerate(zip(engines, (3000, 1000), strict=True)):
        engine.offer(Job(id, tokens, 2), 0.0)
        engine.advance(50.0)
    outcome = outcome_of((1.0, 0.1, 2, OK), (1.0, 0.1, 2, OK))
    outcome.close(20.0, engines)
    found = summary(outcome, Slo(5.0, 0.1))

    assert found.imbalance == pytest.approx(1.5)
    assert found.replica_hours == pytest.approx(2 * 20 / 3600)
    assert found.busy == pytest.approx((engines[0].busy_s + engines[1].busy_s) / 2 / 20)
