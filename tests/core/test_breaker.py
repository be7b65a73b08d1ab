"""The circuit breaker: what opens and closes it, neutral outcomes, brown-outs, and the pool-wide limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import TABLE, Blame, Code
from forebay.core.resilience import (
    NEXT,
    Breaker,
    BreakerLimits,
    BrownOut,
    Event,
    Outcome,
    State,
    Why,
    admissible,
    outcome_of,
    pool_pace_s,
    pool_ttft_s,
    pool_whole_s,
)

OK, NEUTRAL, FAILED = Outcome
LIMITS = BreakerLimits(
    failures_max=3, window=8, failed_share_max=0.5, open_s=5.0, open_s_max=15.0, probes_max=2, successes_min=2
)
LETTERS = {"o": OK, "n": NEUTRAL, "f": FAILED}


def after(outcomes: str, breaker: Breaker | None = None, now: float = 0.0) -> Breaker:
    """The breaker after attempts one by one that ended so."""
    breaker = breaker or Breaker(LIMITS)
    for letter in outcomes:
        breaker.end(breaker.begin(now), LETTERS[letter], now)
    return breaker


@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        ("", Why.SOUND),
        ("ff", Why.SOUND),
        ("fff", Why.IN_A_ROW),
        ("fnnfnnnnnf", Why.IN_A_ROW),
        ("ffoffo", Why.SOUND),
        ("nnnnnnnnnnnnnnnn", Why.SOUND),
        ("ffoffoff", Why.SHARE),
        ("ffonfnfoffn", Why.SHARE),
        ("oooooooooffoffoff", Why.SHARE),
        ("fofofofofofofofo", Why.SOUND),
    ],
)
def test_a_breaker_opens_after_failures_in_a_row_or_for_a_large_share_of_them(outcomes: str, why: Why) -> None:
    breaker = after(outcomes)
    assert (breaker.state, breaker.why) == (State.OPEN if why else State.CLOSED, why)
    assert breaker.admits(0.0) == (not why)


@given(st.lists(st.sampled_from("onf"), max_size=40))
def test_neutral_outcomes_do_not_affect_a_breaker(outcomes: list[str]) -> None:
    with_them, without = Breaker(LIMITS), Breaker(LIMITS)
    for letter in outcomes:
        after(letter, with_them)
        if letter != "n":
            after(letter, without)
        assert (with_them.state, with_them.why) == (without.state, without.why)


def test_open_breaker_admits_a_few_probes_after_its_open_time() -> None:
    breaker = after("fff")
    assert not breaker.admits(4.9)
    assert breaker.admits(5.0)
    assert breaker.state is State.OPEN, "to ask is not to go"
    marks = [breaker.begin(5.0), breaker.begin(5.0)]
    assert (breaker.state, breaker.probes, breaker.admits(5.0)) == (State.HALF_OPEN, 2, False)
    breaker.end(marks[0], NEUTRAL, 6.0)
    assert (breaker.state, breaker.probes, breaker.admits(6.0)) == (State.HALF_OPEN, 1, True)
    breaker.end(marks[1], OK, 6.0)
    assert (breaker.state, breaker.why) == (State.HALF_OPEN, Why.IN_A_ROW)
    after("no", breaker, 7.0)
    assert (breaker.state, breaker.why, breaker.probes) == (State.CLOSED, Why.SOUND, 0)


def test_neutral_probes_never_close_a_breaker() -> None:
    breaker = after("n" * 100, after("fff"), 5.0)
    assert (breaker.state, breaker.probes) == (State.HALF_OPEN, 0)


def test_open_time_doubles_with_each_relapse_up_to_a_limit() -> None:
    breaker, now = after("fff"), 0.0
    for open_s in (5.0, 10.0, 15.0, 15.0):
        assert not breaker.admits(now + open_s - 0.1)
        now += open_s
        after("f", breaker, now)
        assert (breaker.state, breaker.why) == (State.OPEN, Why.PROBE)
    after("oo", breaker, now + 15)
    after("fff", breaker, now + 15 + 14.9)
    assert not breaker.admits(now + 15 + 14.9 + 14.9)
    after("oo", breaker, now + 100)
    after("fff", breaker, now + 115)
    assert breaker.admits(now + 115 + 5)


def test_attempts_from_before_the_last_transition_are_ignored() -> None:
    breaker = Breaker(LIMITS)
    old = [breaker.begin(0.0) for _ in range(9)]
    for mark in old[:3]:
        breaker.end(mark, FAILED, 0.0)
    assert breaker.state is State.OPEN
    breaker.end(old[3], FAILED, 1.0)
    probe = breaker.begin(5.0)
    breaker.end(old[4], OK, 5.0)
    breaker.end(old[5], FAILED, 5.0)
    assert (breaker.state, breaker.probes) == (State.HALF_OPEN, 1)
    late = breaker.begin(5.0)
    breaker.end(probe, OK, 5.0)
    after("o", breaker, 5.0)
    breaker.end(late, FAILED, 9.0)
    after("ff", breaker, 9.0)
    assert breaker.state is State.CLOSED


def test_attempt_through_an_open_breaker_is_not_counted() -> None:
    breaker = after("oof", after("fff"), 1.0)
    assert (breaker.state, breaker.probes) == (State.OPEN, 0)
    assert breaker.admits(5.0)


def test_every_breaker_event_changes_the_state() -> None:
    assert all(state is not to for (state, _), to in NEXT.items())
    assert {event for _, event in NEXT} == set(Event)
    assert {state for state, _ in NEXT} == set(State)


STEPS = st.tuples(st.sampled_from(["begin", "o", "n", "f", "wait"]), st.integers(0, 9))


@given(st.lists(STEPS, max_size=80))
def test_probes_in_flight_are_bounded_and_all_end(steps: list[tuple[str, int]]) -> None:
    breaker, now = Breaker(LIMITS), 0.0
    marks: list[int] = []
    for what, number in steps:
        if what == "wait":
            now += number
        elif what == "begin":
            if breaker.admits(now):
                marks.append(breaker.begin(now))
        elif marks:
            breaker.end(marks.pop(number % len(marks)), LETTERS[what], now)
        assert 0 <= breaker.probes <= LIMITS.probes_max
        assert breaker.handicap(now) >= 1.0
        assert bool(breaker.why) == (breaker.state is not State.CLOSED)
    for mark in marks:
        breaker.end(mark, NEUTRAL, now)
    assert breaker.probes == 0
    assert breaker.admits(now + LIMITS.open_s_max)


# --- slow start and brown-out


def test_recovered_replica_has_a_slow_start() -> None:
    breaker = Breaker(LIMITS)
    assert breaker.handicap(0.0) == 1.0
    breaker.ready(100.0)
    assert breaker.handicap(100.0) == 5.0
    assert breaker.handicap(115.0) == pytest.approx(3.0)
    assert breaker.handicap(130.0) == breaker.handicap(100.0 + 1000) == 1.0, "no tail: it would get nothing meanwhile"
    after("fff", breaker, 1200.0)
    assert breaker.handicap(1201.0) == 5.0
    after("oo", breaker, 1210.0)
    assert breaker.handicap(1210.0) == 5.0
    assert breaker.handicap(1240.0) == 1.0


def noted(breaker: Breaker, ttft_s: float, now: float) -> None:
    for _ in range(8):
        breaker.brown_out.note_ttft(ttft_s, now)


def judged(pool: list[Breaker], now: float) -> list[bool]:
    replicas = [breaker.brown_out for breaker in pool]
    ttft_s, pace_s, whole_s = pool_ttft_s(replicas, now), pool_pace_s(replicas, now), pool_whole_s(replicas, now)
    for replica in replicas:
        replica.judge(ttft_s, pace_s, whole_s, now)
    return [breaker.brown_out.active for breaker in pool]


def test_a_slow_replica_gets_a_handicap_and_loses_it_with_hysteresis() -> None:
    slow, quick = pool = [Breaker(LIMITS), Breaker(LIMITS)]
    for now, ttft_s, active in (
        (0.0, 1.0, False),
        (4.0, 1.0, False),
        (5.0, 1.0, True),
        (36.0, 0.5, True),  # less slow is not well
        (50.0, 0.5, True),
        (81.0, 0.2, True),
        (85.0, 0.2, True),
        (86.0, 0.2, False),
    ):
        for breaker, seconds in ((slow, ttft_s), (quick, 0.2)):
            for _ in range(40):
                breaker.brown_out.note_ttft(seconds, now)
        assert judged(pool, now) == [active, False], now
        assert slow.handicap(now) == (4.0 if active else 1.0)
        assert slow.why == (Why.SLOW if active else Why.SOUND)
        assert slow.state is State.CLOSED, "a handicap, not an exclusion"


@pytest.mark.parametrize(("pace_s", "active"), [(0.1, True), (0.059, False), (0.02, False)])
def test_slow_decoding_is_a_brown_out_despite_a_fast_first_token(pace_s: float, active: bool) -> None:
    slow, quick = pool = [Breaker(LIMITS), Breaker(LIMITS)]
    for now in (0.0, 5.0):
        for breaker, seconds in ((slow, pace_s), (quick, 0.02)):
            noted(breaker, 0.2, now)
            breaker.brown_out.note_paces([seconds] * 5, now)
        assert judged(pool, now) == [active and now == 5.0, False]
    assert slow.why == (Why.SLOW if active else Why.SOUND)
    assert judged(pool, 36.0) == [active, False]
    assert judged(pool, 41.0) == [False, False], "what is long past tells nothing"


@pytest.mark.parametrize(("whole_s", "active"), [(0.7, True), (0.59, False), (0.2, False)])
def test_slow_whole_answers_are_a_brown_out_where_nothing_is_streamed(whole_s: float, active: bool) -> None:
    slow, quick = pool = [Breaker(LIMITS), Breaker(LIMITS)]
    for now in (0.0, 5.0):
        for breaker, seconds in ((slow, whole_s), (quick, 0.2)):
            for turn in range(8):  # between two freezes it is as quick as any
                breaker.brown_out.note_whole(seconds if turn % 2 else 0.2, now)
        assert judged(pool, now) == [active and now == 5.0, False]
    assert judged(pool, 36.0) == [active, False]
    assert judged(pool, 41.0) == [False, False], "what is long past tells nothing"


def test_brief_slowness_is_not_a_brown_out() -> None:
    slow, quick = pool = [Breaker(LIMITS), Breaker(LIMITS)]
    for now in range(0, 200, 40):
        noted(slow, 9.0 if now % 80 else 0.2, now)
        noted(quick, 0.2, now)
        assert judged(pool, now) == [False, False]


@pytest.mark.parametrize(
    ("ttfts_s", "pool_s"),
    [
        ([[], []], None),
        ([[1.0] * 4, [9.0] * 4], None),
        ([[1.0] * 5, []], 1.0),
        ([[1.0] * 5, [9.0] * 5], 1.0),
        ([[1.0, 1.0, 2.0, 8.0, 9.0], [3.0] * 5, [9.0] * 5], 3.0),
    ],
)
def test_pool_reference_is_the_median_of_replicas_with_enough_samples(
    ttfts_s: list[list[float]], pool_s: float | None
) -> None:
    pool = [BrownOut() for _ in ttfts_s]
    for replica, seconds in zip(pool, ttfts_s, strict=True):
        for value in seconds:
            replica.note_ttft(value, 0.0)
    assert pool_ttft_s(pool, 30.0) == pool_s
    assert pool_ttft_s(pool, 30.1) is None


def test_a_replica_slower_by_a_few_milliseconds_is_not_slow() -> None:
    slow, quick = pool = [Breaker(LIMITS), Breaker(LIMITS)]
    for now in (0.0, 10.0):
        noted(slow, 0.050, now)
        noted(quick, 0.001, now)
        assert judged(pool, now) == [False, False]


def test_stalled_streams_cause_a_brown_out_and_silence_ends_it() -> None:
    (breaker,) = pool = [Breaker(LIMITS)]
    breaker.brown_out.note_stall(0.0)
    breaker.brown_out.note_stall(1.0)
    assert judged(pool, 1.0) == judged(pool, 9.0) == [False]
    breaker.brown_out.note_stall(9.0)
    assert judged(pool, 9.0) == [False]
    assert judged(pool, 14.0) == [True]
    assert breaker.why is Why.STALLS
    assert judged(pool, 31.0) == [True]
    assert breaker.why is Why.SLOW
    assert judged(pool, 36.0) == [False]


# --- the pool


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("", []),
        ("ccc", [0, 1, 2]),
        ("coc", [0, 2]),
        ("co", [0]),
        ("ooc", [0, 1, 2]),
        ("o", [0]),
        ("ooo", [0, 1, 2]),
        ("dooc", [0, 3]),
        ("hhc", [2]),
        ("hh", [0, 1]),
    ],
)
def test_breakers_are_ignored_when_more_than_half_are_open(states: str, expected: list[int]) -> None:
    """c: closed, o: open, d: open and due for a probe, h: half open with all its probes under way."""
    breakers = [Breaker(LIMITS) for _ in states]
    for breaker, state in zip(breakers, states, strict=True):
        if state != "c":
            after("fff", breaker, 10.0 if state == "o" else 0.0)
        if state == "h":
            assert [breaker.begin(6.0) for _ in range(LIMITS.probes_max)]
    assert admissible(breakers, 12.0) == expected


@given(st.lists(st.lists(st.tuples(st.sampled_from("onf"), st.integers(0, 20)), max_size=12), min_size=1, max_size=5))
def test_some_replica_is_always_admissible(histories: list[list[tuple[str, int]]]) -> None:
    breakers = [Breaker(LIMITS) for _ in histories]
    for breaker, history in zip(breakers, histories, strict=True):
        for letter, now in sorted(history, key=lambda step: step[1]):
            after(letter, breaker, now)
    assert admissible(breakers, 20.0)


@pytest.mark.parametrize("code", list(Code))
def test_only_replica_faults_count_as_failures(code: Code) -> None:
    failed = outcome_of(code) is FAILED
    assert not (failed and TABLE[code].status < 500)
    if TABLE[code].blame is Blame.MODEL:
        assert failed


def test_full_or_stopping_replica_does_not_count_as_failing() -> None:
    assert {outcome_of(code) for code in (Code.OVERLOADED, Code.DRAINING, Code.ENGINE_LOADING)} == {NEUTRAL}
    assert outcome_of(Code.INTERNAL) is FAILED
