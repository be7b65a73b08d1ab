"""The rollout state machine: its invariants, and typical courses."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.deploy.course import COURSES, Course, Kind, problems, replicas_for
from forebay.core.deploy.rollout import (
    ENDED,
    KNOWN_S,
    Command,
    ModelObservation,
    Phase,
    Rollout,
    Wanted,
    decide,
    wanted,
)
from forebay.core.rollout.guards import GUARDS, Tripped
from forebay.core.rollout.planning import Step
from forebay.core.rollout.values import Decision, Verdict

FINE = Verdict(Decision.PROMOTE, "it is fine", ())
WORSE = Verdict(Decision.ROLLBACK, "errors are worse", ())
OPEN = Verdict(Decision.INCONCLUSIVE, "1,200 more are needed", ())
CRASH = Tripped(GUARDS[0], 1, "1 x crash of the canary within 600 s")


def begun(course: Course) -> Rollout:
    return Rollout("1", "chat", "r-old", "r-new", course, since=0.0)


def seen(
    canary: int | None, verdict: Verdict | None = None, wanted: int = 4, tripped: Tripped | None = None
) -> ModelObservation:
    return ModelObservation(wanted, 4, canary, verdict, tripped)


def test_good_canary_is_promoted_stepwise_and_old_replicas_leave_last() -> None:
    rollout = begun(COURSES[Kind.CANARY])
    told = []
    for at, canary, verdict in [
        (0, 0, None),  # starts one replica
        (60, 1, None),  # which is ready: 5 %
        (660, 1, OPEN),  # the time of the step is over: 20 %
        (700, 1, FINE),  # all, which needs four replicas
        (710, 3, FINE),
        (800, 4, FINE),
        (1399, 4, FINE),
        (1400, 4, FINE),  # ten minutes with all of the traffic
    ]:
        rollout, asked = decide(rollout, seen(canary, verdict), None, float(at))
        told.append((rollout.phase.value, asked))
    assert told == [
        ("starting", Wanted(4, 1)),
        ("comparing", Wanted(4, 1, 0.05)),
        ("comparing", Wanted(4, 1, 0.2)),
        ("settling", Wanted(4, 4, 0.2)),
        ("settling", Wanted(4, 4, 0.2)),
        ("settling", Wanted(4, 4, 1.0)),
        ("settling", Wanted(4, 4, 1.0)),
        ("promoted", Wanted(0, 4, 1.0)),
    ]
    assert rollout.why == "r-new serves everything"


@pytest.mark.parametrize("phase", ["starting", "comparing", "settling"])
@pytest.mark.parametrize("why", ["worse", "crash", "somebody"])
def test_harm_rolls_back_traffic_immediately_from_any_step(phase: str, why: str) -> None:
    rollout = replace(
        begun(COURSES[Kind.CANARY]), phase=Phase(phase), share=0.0 if phase == "starting" else 0.2, step=1
    )
    looked = {"worse": seen(4, WORSE), "crash": seen(4, FINE, tripped=CRASH), "somebody": seen(4, FINE)}[why]
    ended, asked = decide(rollout, looked, Command.ABORT if why == "somebody" else None, 100.0)
    assert (ended.phase, asked) == (Phase.ROLLED_BACK, Wanted(4, 0))
    assert ended.why == {"worse": WORSE.reason, "crash": CRASH.reason, "somebody": "aborted by an operator"}[why]


def test_rollout_ends_if_its_replicas_never_start() -> None:
    ended, asked = decide(begun(COURSES[Kind.CANARY]), seen(0), None, 1800.0)
    assert (ended.phase, asked) == (Phase.ROLLED_BACK, Wanted(4, 0))
    assert ended.why == "0 of 1 replicas of r-new were ready after 1800 s"


def test_blue_green_moves_all_traffic_once_all_replicas_are_ready() -> None:
    rollout = begun(COURSES[Kind.BLUE_GREEN])
    rollout, asked = decide(rollout, seen(3), None, 10.0)
    assert (rollout.phase, asked) == (Phase.STARTING, Wanted(4, 4))
    rollout, asked = decide(rollout, seen(4), None, 20.0)
    rollout, asked = decide(rollout, seen(4), None, 20.0)
    assert (rollout.phase, asked) == (Phase.SETTLING, Wanted(4, 4, 1.0))


@pytest.mark.parametrize(("kind", "asked"), [(Kind.SHADOW, Wanted(4, 1, 0.0, 0.2)), (Kind.AB, Wanted(4, 2, 0.5))])
def test_shadow_and_ab_end_with_a_result_and_move_no_traffic(kind: Kind, asked: Wanted) -> None:
    rollout, _ = decide(begun(COURSES[kind]), seen(2), None, 1.0)
    compared, found = decide(rollout, seen(2, WORSE), None, 2.0)
    assert (compared.phase, found) == (Phase.COMPARING, asked)
    ended, found = decide(compared, seen(2, WORSE), None, 1e6)
    assert (ended.phase, found) == (Phase.JUDGED, Wanted(4, 0))


def test_without_a_verdict_in_time_a_rollout_waits_for_an_operator_or_rolls_back() -> None:
    last = replace(begun(COURSES[Kind.CANARY]), phase=Phase.COMPARING, step=1, share=0.2)
    waits, asked = decide(last, seen(1, OPEN), None, 1e5)
    assert (waits.phase, asked.share) == (Phase.COMPARING, 0.2)
    assert "waiting for an operator: 1,200 more are needed" in waits.why
    assert decide(waits, seen(1, OPEN), Command.PROMOTE, 1e5)[0].phase is Phase.SETTLING
    ended, _ = decide(replace(last, course=replace(last.course, hold=False)), seen(1, OPEN), None, 1e5)
    assert ended.phase is Phase.ROLLED_BACK


def test_unknown_state_does_not_promote() -> None:
    rollout = replace(begun(COURSES[Kind.BLUE_GREEN]), phase=Phase.SETTLING, share=1.0)
    assert decide(rollout, seen(None), None, 1e6)[0].phase is Phase.SETTLING
    assert decide(rollout, seen(4), None, 1e6)[0].phase is Phase.PROMOTED


def test_clock_set_back_restarts_the_step() -> None:
    rollout = replace(begun(COURSES[Kind.BLUE_GREEN]), phase=Phase.SETTLING, share=1.0, since=7200.0)
    rollout, _ = decide(rollout, seen(4), None, 100.0)
    assert (rollout.phase, rollout.since) == (Phase.SETTLING, 100.0)
    assert decide(rollout, seen(4), None, 700.0)[0].phase is Phase.PROMOTED


def test_promote_ends_settling_as_soon_as_all_replicas_are_ready() -> None:
    rollout = replace(begun(COURSES[Kind.BLUE_GREEN]), phase=Phase.SETTLING, share=1.0, paused=True)
    assert decide(rollout, seen(3), Command.PROMOTE, 10.0)[0].phase is Phase.SETTLING
    assert decide(rollout, seen(4), Command.PROMOTE, 10.0)[0].phase is Phase.PROMOTED


def test_old_replicas_stay_until_every_gateway_has_the_new_routes() -> None:
    course = replace(COURSES[Kind.BLUE_GREEN], settle_s=0.0)
    rollout = replace(begun(course), phase=Phase.SETTLING, share=1.0, since=100.0)
    for command in (None, Command.PROMOTE):
        assert decide(rollout, seen(4), command, 100.0 + KNOWN_S / 2)[0].phase is Phase.SETTLING
        assert decide(rollout, seen(4), command, 100.0 + KNOWN_S)[0].phase is Phase.PROMOTED
        for whole_s, phase in ((KNOWN_S / 2, Phase.SETTLING), (KNOWN_S, Phase.PROMOTED)):
            assert decide(rollout, replace(seen(4), whole_s=whole_s), command, 1e6)[0].phase is phase


def test_pause_keeps_the_share_but_not_the_guards() -> None:
    rollout, _ = decide(begun(COURSES[Kind.CANARY]), seen(1), None, 1.0)
    paused, asked = decide(rollout, seen(1, FINE), Command.PAUSE, 1e6)
    assert (paused.phase, paused.step, asked.share) == (Phase.COMPARING, 0, 0.05)
    assert decide(paused, seen(1, FINE), None, 2e6)[0].step == 0
    assert decide(paused, seen(1, FINE), Command.RESUME, 2e6)[0].step == 1
    assert decide(paused, seen(1, FINE, tripped=CRASH), None, 2e6)[0].phase is Phase.ROLLED_BACK


STEPS = st.lists(st.floats(0.01, 0.9), min_size=1, max_size=3).map(
    lambda shares: tuple(Step(share, 100.0) for share in sorted(shares))
)
RUNS = st.one_of(
    st.builds(Course, st.just(Kind.CANARY), STEPS, hold=st.booleans(), settle_s=st.sampled_from([0.0, 50.0])),
    st.just(COURSES[Kind.BLUE_GREEN]),
    st.builds(Course, st.sampled_from([Kind.SHADOW, Kind.AB]), STEPS.map(lambda steps: steps[:1])),
)
LOOKS = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.one_of(st.none(), st.integers(0, 6)),
        st.sampled_from([None, FINE, OPEN, OPEN, WORSE]),
        st.sampled_from([None, None, None, None, CRASH]),
        st.sampled_from([None, None, None, *Command]),
        st.integers(0, 6),
    ),
    max_size=25,
)


@given(RUNS, LOOKS)
def test_a_share_never_exceeds_ready_replicas_and_the_stable_revision_stays(
    course: Course, looks: list[tuple[int, int | None, Verdict | None, Tripped | None, Command | None, int]]
) -> None:
    assert not list(problems(course))
    rollout, now, known, share = begun(course), 0.0, 0, 0.0
    for later, ready, verdict, tripped, command, replicas in looks:
        now += later
        looked = ModelObservation(replicas, None if ready is None else 4, ready, verdict, tripped)
        before = rollout
        rollout, asked = decide(rollout, looked, command, now)
        known = known if ready is None else ready
        ended = rollout.phase in ENDED
        if not ended:
            assert asked.stable == max(replicas, 1)
            assert asked.share == 0.0 or known > 0
            if ready is not None and rollout.share > share:
                assert ready >= replicas_for(rollout.share, max(replicas, 1))
        if ready is None and not ended:
            assert rollout.share == before.share
        if tripped and before.phase not in ENDED:
            assert (rollout.phase, asked.share, asked.canary) == (Phase.ROLLED_BACK, 0.0, 0)
        if before.phase in ENDED:
            assert rollout == before
        if course.kind in (Kind.SHADOW, Kind.AB):
            assert rollout.phase not in (Phase.SETTLING, Phase.PROMOTED)
        if rollout.phase is Phase.PROMOTED and before.phase is not Phase.PROMOTED:
            assert (share, before.phase) == (1.0, Phase.SETTLING)
            assert known >= max(replicas, 1)
        assert 0.0 <= asked.share <= 1.0
        settled, again = decide(rollout, looked, None, now)
        if rollout.phase is not Phase.STARTING and settled.phase is rollout.phase:
            assert (settled, again) == (rollout, asked) or settled.share != rollout.share or before.forced
        share = rollout.share
        assert wanted(rollout, looked) == asked


@given(RUNS, st.integers(1, 12))
def test_every_course_ends_given_replicas_and_verdicts(course: Course, replicas: int) -> None:
    rollout, now = begun(course), 0.0
    for _ in range(60):
        rollout, asked = decide(rollout, ModelObservation(replicas, replicas, replicas, FINE), None, now)
        now += 60.0
    assert rollout.phase is (Phase.PROMOTED if course.takes_over else Phase.JUDGED)
    assert asked == (Wanted(0, replicas, 1.0) if course.takes_over else Wanted(replicas, 0))


@pytest.mark.parametrize(
    ("course", "said"),
    [
        (Course(steps=()), "at least one"),
        (Course(steps=(Step(1.0, 60.0),)), "below 1"),
        (Course(steps=(Step(0.0, 60.0),)), "above 0"),
        (Course(steps=(Step(0.2, 60.0), Step(0.1, 60.0))), "grow"),
        (Course(steps=(Step(0.2, 0.0),)), "a time above 0"),
        (Course(steps=(Step(0.2, 20.0),)), "shorter than every step"),
        (Course(Kind.BLUE_GREEN), "none for blue-green"),
        (Course(Kind.AB), "exactly one for ab"),
        (Course(settle_s=-1.0), "settle_s"),
        (Course(start_timeout_s=float("inf")), "start_timeout_s"),
    ],
)
def test_invalid_course_is_explained(course: Course, said: str) -> None:
    assert any(said in problem for problem in problems(course))


def test_default_courses_are_valid() -> None:
    assert all(not list(problems(course)) for course in COURSES.values())
    assert [replicas_for(share, 4) for share in (0.01, 0.25, 0.26, 0.5, 1.0)] == [1, 1, 2, 2, 4]
