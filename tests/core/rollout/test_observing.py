"""The state kept of observations, and its invariances."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.rollout.streams import batch

from forebay.core.rollout import observing
from forebay.core.rollout.judging import judge
from forebay.core.rollout.observing import begin, observe
from forebay.core.rollout.values import (
    STRATA_MAX,
    Arm,
    Decision,
    Finding,
    Observation,
    Rate,
    Rules,
    Score,
    State,
    Time,
    stratum_of,
)

RULES = Rules((Rate("errors"), Time("ttft", both_ways=True), Score("quality")))


def after(rules: Rules, observations: list[Observation], several: int = 100) -> State:
    return more(rules, begin(rules), observations, several)


def more(rules: Rules, state: State, observations: list[Observation], several: int = 100) -> State:
    for index in range(0, len(observations), several):
        state = observe(rules, state, observations[index : index + several])
    return state


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_the_order_within_a_batch_does_not_matter(seed: int, shuffle: Random) -> None:
    observations = batch(Random(seed), 60)
    shuffled = list(observations)
    shuffle.shuffle(shuffled)
    state = after(RULES, batch(Random(seed + 1), 200))

    one, other = observe(RULES, state, observations), observe(RULES, state, shuffled)

    assert one.rates == other.rates
    assert one.times["ttft"].up == pytest.approx(other.times["ttft"].up)
    assert one.times["ttft"].down == pytest.approx(other.times["ttft"].down)
    assert one.times["ttft"].tail == pytest.approx(other.times["ttft"].tail)
    assert one.times["ttft"].sketches == other.times["ttft"].sketches
    assert one.scores["quality"].shift.mean == pytest.approx(other.scores["quality"].shift.mean, abs=0.05)


def test_evidence_state_round_trips_through_json() -> None:
    state = after(RULES, batch(Random(1), 2000))
    text = msgspec.json.encode(state)

    again = msgspec.json.decode(text, type=State)
    further = observe(RULES, again, batch(Random(2), 100))

    assert again == state
    assert further != state
    assert msgspec.json.encode(state) == text
    assert further == observe(RULES, state, batch(Random(2), 100))


def test_evidence_state_size_is_independent_of_the_number_of_requests() -> None:
    few = after(RULES, batch(Random(1), 1000))
    many = few
    for seed in range(2, 6):
        many = more(RULES, many, batch(Random(seed), 1000))

    assert len(msgspec.json.encode(many)) < 1.3 * len(msgspec.json.encode(few))


def test_values_of_one_arm_wait_for_the_other_up_to_a_limit() -> None:
    state = begin(RULES)
    alone = [Observation(name, Arm.STABLE, 1.0) for name in ("errors", "ttft", "quality")]
    for _ in range(3 * observing.WAITING_MAX):
        state = observe(RULES, state, alone)

    assert len(state.times["ttft"].waiting[""].stable) == observing.WAITING_MAX
    assert len(state.scores["quality"].waiting[""].stable) == observing.WAITING_MAX
    assert state.times["ttft"].blocks == 0

    state = observe(RULES, state, [observation._replace(arm=Arm.CANARY) for observation in alone])

    assert state.times["ttft"].blocks == 1
    assert state.times["ttft"].waiting[""] == state.scores["quality"].waiting[""] == ((), ())
    assert state.rates["errors"].waiting[""] == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        Observation("unknown", Arm.CANARY, 1.0),
        Observation("errors", Arm.CANARY, 0.5),
        Observation("ttft", Arm.CANARY, 0.0),
        Observation("ttft", Arm.CANARY, float("nan")),
        Observation("ttft", Arm.CANARY, float("inf")),
        Observation("quality", Arm.CANARY, -0.1),
        Observation("quality", Arm.CANARY, 1.1),
    ],
    ids=str,
)
def test_invalid_observations_are_counted_and_ignored(wrong: Observation) -> None:
    state = begin(RULES)
    good = Observation("errors", Arm.CANARY, 1.0)

    assert observe(RULES, state, [wrong]).ignored == 1
    assert observe(RULES, state, [wrong, good]).rates["errors"].total.canary == 1
    assert observe(RULES, state, [wrong]).times == state.times


def test_observations_of_strata_beyond_the_limit_are_counted_and_ignored() -> None:
    several = STRATA_MAX + 3
    observations = [Observation("errors", Arm.CANARY, 0.0, f"{index:02}") for index in range(several)]

    state = observe(RULES, begin(RULES), observations)
    again = observe(RULES, state, observations)

    assert len(state.rates["errors"].waiting) == STRATA_MAX
    assert (state.ignored, again.ignored) == (3, 6)
    assert again.rates["errors"].total.canary == 2 * STRATA_MAX


@settings(max_examples=5)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.9, 1.0]))
def test_different_prompts_in_the_canary_are_not_harm(seed: int, long_share: float) -> None:
    state = after(RULES, batch(Random(seed), 1500, long_share=long_share))

    assert judge(RULES, state).decision is not Decision.ROLLBACK


def test_different_prompts_count_as_harm_without_strata() -> None:
    observations = [o._replace(stratum="") for o in batch(Random(1), 1500, long_share=0.9)]

    assert judge(RULES, after(RULES, observations)).decision is Decision.ROLLBACK


def test_change_in_both_arms_is_not_harm() -> None:
    state = begin(RULES)
    for index in range(60):
        slower = 10.0 if index % 20 >= 10 else 1.0
        found = [
            o._replace(value=o.value * (slower if o.metric == "ttft" else 1.0)) for o in batch(Random(index), 40)
        ]
        state = observe(RULES, state, found)

    assert all(part.finding is not Finding.WORSE for part in judge(RULES, state).parts)


def test_an_empty_batch_changes_nothing() -> None:
    assert observe(RULES, begin(RULES), []) == begin(RULES)


@pytest.mark.parametrize("canaries", [1, 2, 10, 31])
def test_a_large_block_of_scores_is_divided_without_losing_any(canaries: int) -> None:
    rules = Rules((Score("quality"),))
    scores = [Observation("quality", Arm.STABLE, 1.0)] * (60 - canaries)
    scores += [Observation("quality", Arm.CANARY, 0.5)] * canaries

    state = observe(rules, begin(rules), scores).scores["quality"]

    assert state.shift.mean == -0.5
    assert state.shift.weight**2 / state.shift.squares == pytest.approx(min(canaries, 60 // 16), rel=0.1)
    assert state.waiting == {"": ((), ())}


def test_paired_scores_are_compared_without_waiting() -> None:
    rules = Rules((Score("quality", paired=True),))
    state = observe(rules, begin(rules), [Observation("quality", Arm.CANARY, -0.5)])

    assert state.scores["quality"].shift.mean == -0.5
    assert state.scores["quality"].canary == 1
    assert state.ignored == 0


@pytest.mark.parametrize(
    ("tokens", "stratum"),
    [(0, "256"), (256, "256"), (257, "1024"), (1025, "4096"), (262144, "262144"), (262145, "longer")],
)
def test_stratum_of_a_prompt_spans_a_factor_of_four_in_length(tokens: int, stratum: str) -> None:
    assert stratum_of(tokens) == stratum
