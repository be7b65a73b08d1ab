"""Learned properties of replicas: speeds from noise, trust from cache hits, and accounts that return to zero."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.routing import Charge, Lengths, Meter
from forebay.core.routing.speed import OUTLIER, OUTPUT_TOKENS, PROMPT_TOKENS, TOKENS_PER_BYTE, Line


def line(assumed: float, samples: list[tuple[float, float]]) -> Line:
    learned = Line(assumed)
    for x, y in samples:
        learned.add(x, y)
    return learned


def test_line_fit_recovers_the_line_from_noisy_samples() -> None:
    rng = Random(1)
    xs = [rng.uniform(1, 32) for _ in range(200)]
    learned = line(0.0, [(x, (0.008 + 0.0004 * x) * rng.uniform(0.95, 1.05)) for x in xs])
    assert learned.slope() == pytest.approx(0.0004, rel=0.25)


@pytest.mark.parametrize(("assumed", "slope"), [(0.0, 0.0), (1.0, 0.05)])
def test_equal_samples_keep_the_assumed_slope(assumed: float, slope: float) -> None:
    assert line(assumed, [(4.0, 0.2)] * 20).slope() == pytest.approx(slope)


positive = st.floats(1e-3, 1e6)


@given(st.sampled_from([0.0, 1.0]), st.lists(st.tuples(positive, positive), min_size=1, max_size=50))
def test_fitted_line_is_never_negative(assumed: float, samples: list[tuple[float, float]]) -> None:
    learned = line(assumed, samples)
    assert 0.0 <= learned.slope() <= learned.y / learned.x
    assert learned.slope() >= assumed * learned.y / learned.x / 2


def test_learned_speed_resists_one_stall_and_follows_a_lasting_change() -> None:
    meter = Meter("chat-0", 1)
    rng = Random(2)
    for _ in range(50):
        tokens = rng.randrange(100, 4000)
        meter.learn_prefill(tokens, tokens / 8000)
    assert meter.prefill_tokens_per_s == pytest.approx(8000, rel=0.01)
    meter.learn_prefill(2000, 600.0)
    assert meter.prefill_tokens_per_s > 8000 / OUTLIER
    for _ in range(200):
        tokens = rng.randrange(100, 4000)
        meter.learn_prefill(tokens, tokens / 500)
    assert meter.prefill_tokens_per_s == pytest.approx(500, rel=0.05)


def test_speed_and_slope_are_unknown_until_a_few_samples_agree_on_them() -> None:
    meter = Meter("chat-0", 1)
    known = []
    for n in (1, 2, 3):
        meter.learn_prefill(1000, 0.5)
        meter.learn_decode(n, 0.01 + n * 0.001)
        known.append((meter.prefill_tokens_per_s > 0, meter.decode_slope_s > 0))
    assert known == [(False, False), (False, False), (True, True)]


def test_zero_duration_does_not_make_a_replica_infinitely_fast() -> None:
    meter = Meter("chat-0", 1)
    for _ in range(4):
        meter.learn_prefill(0, 0.0)
        meter.learn_decode(0, -1.0)
    assert 0 < meter.prefill_tokens_per_s <= 2e6
    assert meter.decode_slope_s >= 0


def test_cache_trust_follows_reported_hits_and_ignores_unknown_ones() -> None:
    meter = Meter("chat-0", 1)

    def served(hit_tokens: int, cached_tokens: int | None) -> float:
        meter.charge(1000, hit_tokens, 0.0).done(1.0, 1, 2000, cached_tokens, 1)
        return meter.trust

    assert served(1000, None) == 1.0
    assert served(0, 500) == 1.0
    assert served(1000, 4000) == 1.0
    assert served(1000, 0) == pytest.approx(0.9)
    assert served(5000, 1000) == pytest.approx(0.86)  # no more than the prompt can have been expected
    for _ in range(100):
        trust = served(1000, 250)
    assert trust == pytest.approx(0.25, abs=0.01)


steps = st.lists(
    st.tuples(st.sampled_from(["charge", "first", "release", "done", "report", "dark", "settle"]), st.integers(0, 9))
)


@given(steps)
def test_queued_work_returns_to_zero_after_any_events(todo: list[tuple[str, int]]) -> None:
    meter = Meter("chat-0", 1)
    charges: list[Charge] = []
    reported = 0
    for now, (what, which) in enumerate(todo):
        charge = charges[which % len(charges)] if charges else None
        if what == "charge":
            charges.append(meter.charge(100 * which + 1, 0, float(now)))
            if which % 2:
                meter.watch(charges[-1])
        elif what == "report":
            reported = which
            meter.report(which, 0.5, 3)
        elif what == "dark":
            reported = 0
            meter.report(None, 0.5, 3)
        elif what == "settle":
            meter.settle(float(now), 50.0)
        elif charge is not None and what == "first":
            charge.first_token(float(now), 1)
        elif charge is not None and what == "release":
            charge.release()
        elif charge is not None:
            charge.done(float(now), 1, 100, 0, 20)
        waiting = sum(charge.tokens for charge in charges if charge.queued)
        assert waiting <= meter.queue_tokens <= reported + 3 * waiting
    for charge in charges:
        charge.release()
    assert meter.queue_tokens == reported


def test_queue_estimate_is_the_report_plus_traffic_since_and_at_least_the_own_work() -> None:
    meter = Meter("chat-0", 1)
    early = meter.charge(1000, 0, 0.0)
    assert meter.queue_tokens == 1000
    meter.report(400, 2.0, 3)
    assert meter.kv_share == 0.99
    assert meter.queue_tokens == 1000
    late = meter.charge(300, 0, 1.0)
    assert late.ahead_tokens == 1000
    assert meter.queue_tokens == 1300
    early.first_token(1.1, 1)
    assert meter.queue_tokens == 400 + 3 * 300
    late.release()
    assert meter.queue_tokens == 400
    meter.report(None, -1.0, 3)
    assert (meter.queue_tokens, meter.kv_share) == (0, 0.0)


def test_prompt_of_an_unstreamed_request_is_queued_for_its_expected_time() -> None:
    meter = Meter("chat-0", 1)
    first, second, third = (meter.charge(1000, 0, 0.0) for _ in range(3))
    for charge in (first, second, third):
        meter.watch(charge)
    meter.settle(0.9, 1000.0)
    assert meter.queue_tokens == 3000
    meter.settle(1.0, 1000.0)
    assert meter.queue_tokens == 2000
    second.done(1.5, 1, 1000, None, 100)
    assert not second.queued
    meter.settle(3.0, 1000.0)
    assert meter.queue_tokens == 0
    assert meter.prefill_tokens_per_s == 0.0


def test_prefill_speed_is_learned_from_computed_tokens_and_tpot_from_long_answers() -> None:
    meter = Meter("chat-0", 1)
    now = 0.0
    for running in (2, 4, 6, 8) * 20:
        charge = meter.charge(1000, 0, now)
        charge.first_token(now + 0.1, running)
        charge.done(now + 0.1 + 99 * (0.01 + 0.001 * running), running, 1000, 600, 100)
        now += 10
    assert meter.prefill_tokens_per_s == pytest.approx(4000)
    assert meter.decode_slope_s == pytest.approx(0.001, rel=0.3)
    charge = meter.charge(1000, 0, now)
    charge.first_token(now, 1)
    charge.done(now + 100, 1, 1000, None, 2)
    assert meter.decode_slope_s == pytest.approx(0.001, rel=0.3)


def test_output_lengths_are_assumed_until_answers_are_observed() -> None:
    lengths = Lengths()
    assert lengths.tokens(4000) == 1000
    assert lengths.tokens(0) == 0
    lengths.learn(4000, 2000, 100)
    assert (lengths.tokens(4000), lengths.output_tokens) == (2000, 100)
    for _ in range(200):
        lengths.learn(1000, 300, 50)
    assert lengths.tokens(1000) == 300
    assert lengths.output_tokens == pytest.approx(50, abs=1)


def test_longest_answer_is_tracked_by_tenant_and_fades() -> None:
    lengths = Lengths()
    lengths.learn_longest("a", 900)
    assert (lengths.longest_tokens("a"), lengths.longest_tokens("b")) == (900, OUTPUT_TOKENS)
    for _ in range(300):
        lengths.learn_longest("a", 100)
    assert lengths.longest_tokens("a") == pytest.approx(100, rel=0.01)
    lengths.learn_longest("a", 10**9)
    assert lengths.longest_tokens("a") == OUTLIER * OUTPUT_TOKENS, "one count beyond all reason"


def test_time_per_token_follows_finished_answers() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.learn_pace(0.1)
    assert lengths.pace_s == pytest.approx(0.1, rel=0.01)
    lengths.learn_pace(1e6)
    assert lengths.pace_s < 0.2


@given(st.lists(st.integers(0, 10**4), max_size=20), st.integers(0, 10**12))
def test_outlier_changes_a_mean_by_a_bounded_factor(before: list[int], told: int) -> None:
    lengths = Lengths()
    for count in before:
        lengths.learn(1000, count, count)
    per_byte, output, prompt = lengths.tokens_per_byte, lengths.output_tokens, lengths.prompt_tokens
    lengths.learn(1, told, told)
    assert lengths.tokens_per_byte <= OUTLIER * max(per_byte, TOKENS_PER_BYTE)
    assert lengths.output_tokens <= OUTLIER * max(output, OUTPUT_TOKENS)
    assert lengths.prompt_tokens <= OUTLIER * max(prompt, PROMPT_TOKENS)
