"""Invariants of every scaling policy: bounds, zero, signals, windows, paces, no removal while load is unknown."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.scaling.autoscaled_model import BUSY, QUIET, T0, Model

from forebay.core.scaling.decide import CHANGES_MAX, GAP_S, bounds, decide, value_of
from forebay.core.scaling.schedule import Hours
from forebay.core.scaling.settings import Limit, Pace, Policy, Scale, Signal
from forebay.core.scaling.state import AutoscalerState
from forebay.core.scaling.values import Reading, Reason

HPA = Scale(10, policy=Policy.HPA, target=4.0, limits=())
"""Half a minute after it began it does in one step what the signal says: a policy for tests of what is around one."""
DAY = Hours((0, 1, 2, 3, 4), 8 * 60, 20 * 60, "UTC", 3, 12)
MONDAY = T0 + 2 * 86_400.0


def looks(model: Model, per_s: float, count: int) -> list[int]:
    return [model.look(per_s).wanted for _ in range(count)]


def test_first_matching_schedule_entry_sets_the_bounds() -> None:
    scale = Scale(8, 1, schedule=(DAY, Hours((0,), 0, 1440, "UTC", max=2)))

    assert bounds(scale, MONDAY + 3600 * 9) == (3, 12)
    assert bounds(scale, MONDAY + 3600 * 7) == (1, 2)
    assert bounds(scale, T0) == (1, 8)


def test_scheduled_replicas_start_ahead_of_their_hours() -> None:
    scale = Scale(8, 1, schedule=(DAY,), lead_s=120.0)

    early, _ = decide(scale, AutoscalerState(), QUIET, MONDAY + 8 * 3600 - 121, current=1)
    soon, _ = decide(scale, AutoscalerState(), QUIET, MONDAY + 8 * 3600 - 119, current=1)

    assert (early.wanted, soon.wanted, soon.reason) == (1, 3, Reason.BOUND)


def test_replicas_above_the_maximum_are_removed_immediately() -> None:
    decision, _ = decide(Scale(4), AutoscalerState(), BUSY, T0, current=6)

    assert (decision.wanted, decision.reason) == (4, Reason.BOUND)
    assert "`max` is 4" in decision.why


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("least", [0, 1])
def test_clock_that_is_set_back_delays_no_change_beyond_its_window(policy: Policy, least: int) -> None:
    model = Model(Scale(10, least, policy=policy, ttft_s=1.0, target=2.0, limits=()))
    looks(model, 0.5, 100)
    model.now -= 86_400.0
    assert max(model.look(8.0, ttft_s=2.0).wanted for _ in range(150)) > 1
    model.now -= 86_400.0
    assert looks(model, 0.0, 1000)[-1] == least


@pytest.mark.parametrize("policy", list(Policy))
def test_telemetry_outage_and_the_time_after_it_remove_nothing(policy: Policy) -> None:
    model = Model(Scale(10, policy=policy, ttft_s=1.0, target=2.0), replicas=4)
    looks(model, 10.0, 100)
    before = model.replicas

    out = [model.look(0.0, known=False).wanted for _ in range(50)]
    after = looks(model, 0.0, int(GAP_S / model.tick_s) - 1)
    later = looks(model, 0.0, 150)

    assert set(out) == {before}
    assert min(after) >= before
    assert model.decisions[120].reason is Reason.UNKNOWN
    assert later[-1] < before


def test_telemetry_outage_applies_the_minimum_but_no_scheduled_maximum() -> None:
    scale = Scale(8, 2, schedule=(DAY,))

    said = [decide(scale, AutoscalerState(), None, T0, current=current)[0] for current in (1, 11, 14)]
    assert [(each.wanted, each.reason, each.why) for each in said] == [
        (2, Reason.BOUND, "the load is not known, but `min` is 2 now"),
        (11, Reason.UNKNOWN, "the load is not known: no replica is removed"),
        (12, Reason.BOUND, "the load is not known, but `max` is 12 now"),
    ]


def test_first_request_starts_a_replica_and_a_long_pause_removes_it() -> None:
    model = Model(Scale(4, 0, to_zero_after_s=100.0), replicas=0, cold_s=20.0)

    asleep = looks(model, 0.0, 5)
    woken = model.look(1.0)
    looks(model, 1.0, 20)
    idle = looks(model, 0.0, 40)

    assert asleep == [0] * 5
    assert (woken.wanted, woken.reason) == (1, Reason.WAKE)
    assert idle[-1] == 0
    assert model.decisions[-1].reason is Reason.IDLE
    assert 0 not in idle[: int(100 / model.tick_s) - 1]


def test_the_first_replica_is_not_taken_away_while_it_starts() -> None:
    model = Model(Scale(4, 0, to_zero_after_s=10.0), replicas=0, cold_s=200.0)

    looks(model, 0.0, 2)

    assert {model.look(1.0).wanted, *looks(model, 0.0, 38)} == {1}


def test_with_a_minimum_the_last_replica_stays() -> None:
    assert set(looks(Model(Scale(4, to_zero_after_s=0.0)), 0.0, 30)) == {1}


def test_signal_above_its_limit_for_long_enough_adds_replicas() -> None:
    scale = Scale(10, limits=(Limit(Signal.DUTY, 0.7, 120.0),))
    model = Model(scale, replicas=4)

    before = [model.look(0.1, duty=0.99).wanted for _ in range(24)]
    after = model.look(0.1, duty=0.99)

    assert set(before) == {4}
    assert (after.wanted, after.reason) == (6, Reason.SIGNAL)
    assert "duty of 0.99 has been above 0.7 for 120 s" in after.why


def test_scale_in_that_would_exceed_a_signal_limit_is_prevented() -> None:
    scale = replace(HPA, limits=(Limit(Signal.KV_USE, 0.9, 10.0),))
    state, decisions = AutoscalerState(), []
    for tick in range(200):
        reading = replace(QUIET, at=T0 + tick * 5, ready=4, kv_use=0.8)
        decision, state = decide(scale, state, reading, reading.at, current=4)
        decisions.append(decision)

    assert {decision.wanted for decision in decisions} == {4}
    assert "kv_use of 0.8 needs 4" in decisions[-1].why


def test_changed_signal_limits_restart_their_timers() -> None:
    one, two = Limit(Signal.DUTY, 0.7, 0.0), Limit(Signal.BUSY, 0.7, 0.0)
    _, state = decide(Scale(9, limits=(one,)), AutoscalerState(), replace(BUSY, duty=0.9), T0, current=1)

    _, after = decide(Scale(9, limits=(one, two)), state, replace(BUSY, duty=0.9), T0 + 5, current=1)

    assert (state.above, after.above) == ((T0,), (T0, None))


def test_scale_out_obeys_its_window_and_rate() -> None:
    state, seen, current = AutoscalerState(), [], 1
    scale = replace(HPA, up=Pace(30.0, 2, 60.0))
    for tick in range(60):
        reading = replace(BUSY, at=T0 + tick * 5, ready=current, in_flight=40.0)
        decision, state = decide(scale, state, reading, reading.at, current=current)
        seen.append(decision.wanted - current)
        current = decision.wanted

    at = [tick * 5 for tick, by in enumerate(seen) if by]
    assert current == 10
    assert at[0] >= 30
    assert all(sum(seen[tick : tick + 12]) <= 2 for tick in range(49))


def test_scale_in_obeys_its_rate() -> None:
    model = Model(replace(HPA, down=Pace(0.0, 1, 50.0)), replicas=5)

    wanted = looks(model, 0.0, 100)

    assert wanted[-1] == 1
    assert all(before - after <= 1 for before, after in zip(wanted, wanted[9:], strict=False))


@pytest.fixture(scope="module")
def calm() -> AutoscalerState:
    """Of a model that one replica has sufficed for an hour."""
    state = AutoscalerState()
    for tick in range(720):
        reading = replace(BUSY, at=T0 + tick * 5, arrivals=1, completions=1)
        _, state = decide(Scale(10, ttft_s=1.0), state, reading, reading.at, current=1)
    return state


@pytest.mark.parametrize(
    ("removed_s", "added_s", "fewer", "goes"),
    [(1200, 900, 1, False), (1200, 900, 2, True), (5000, 900, 1, True), (5000, 100, 1, False), (900, 1200, 1, True)],
    ids=["back and forth", "two do not come back", "an hour ago", "just added", "one way"],
)
def test_replica_count_does_not_flap(
    calm: AutoscalerState, removed_s: float, added_s: float, fewer: int, goes: bool
) -> None:
    """One was removed, and one added, so long ago: are so many removed now?"""
    now = T0 + 3600
    changes = tuple(sorted([(now - removed_s, -1), (now - added_s, 1)]))
    reading = replace(QUIET, at=now, ready=1 + fewer)

    decision, _ = decide(Scale(10, ttft_s=1.0), replace(calm, changes=changes), reading, now, current=reading.ready)

    assert decision.wanted == (1 if goes else reading.ready)


def test_history_of_replica_changes_is_bounded() -> None:
    state, current = AutoscalerState(), 1
    for tick in range(3 * CHANGES_MAX):
        low = 1 + tick % 2
        decision, state = decide(Scale(low, low), state, QUIET, T0 + tick, current=current)
        current = decision.wanted

    assert len(state.changes) == CHANGES_MAX


@pytest.mark.parametrize(
    ("signal", "value"),
    [
        (Signal.CONCURRENCY, 2.0), (Signal.QUEUE, 3.0), (Signal.BACKLOG_TOKENS, 500.0), (Signal.KV_USE, 0.2),
        (Signal.BUSY, 0.3), (Signal.DUTY, None), (Signal.TTFT_S, 0.3), (Signal.TPOT_S, 0.03),
        (Signal.PREDICTED_TTFT_S, 0.7), (Signal.PREDICTED_TPOT_S, 0.05), (Signal.REQUESTS_PER_GPU, 0.5),
    ],
)  # fmt: skip
def test_signal_values_are_per_ready_replica(signal: Signal, value: float | None) -> None:
    reading = replace(
        BUSY, ready=2, in_flight=4.0, waiting=6, backlog_tokens=1000, busy=0.3, predicted_ttft_s=0.7,
        predicted_tpot_s=0.05, gpus=4.0,
    )  # fmt: skip

    assert value_of(signal, reading) == value


def test_requests_per_gpu_count_fractions_of_shared_gpus() -> None:
    shown = [value_of(Signal.REQUESTS_PER_GPU, replace(BUSY, ready=2, gpus=gpus)) for gpus in (0.0, 0.25, 1.0)]

    assert shown == [None, 8.0, 2.0]


def test_unmeasured_latencies_are_zero_at_rest_and_unknown_under_load() -> None:
    loaded = replace(BUSY, ttft_s=None, tpot_s=None)

    for signal in (Signal.TTFT_S, Signal.TPOT_S):
        assert value_of(signal, QUIET) == 0.0
        assert value_of(signal, loaded) is None


OFTEN_UNKNOWN = [
    Signal.KV_USE, Signal.BUSY, Signal.DUTY, Signal.TTFT_S, Signal.TPOT_S, Signal.PREDICTED_TTFT_S,
    Signal.PREDICTED_TPOT_S, Signal.REQUESTS_PER_GPU,
]  # fmt: skip
UNKNOWN = replace(BUSY, kv_use=None, busy=None, ttft_s=None, tpot_s=None)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([Policy.HPA, Policy.KPA, Policy.APA]),
    st.sampled_from(OFTEN_UNKNOWN),
    st.integers(1, 9),
    st.lists(st.floats(0.0, 100.0), max_size=60),
)
def test_rule_with_an_unknown_signal_removes_no_replica_and_resumes_later(
    policy: Policy, signal: Signal, current: int, before: list[float]
) -> None:
    scale = Scale(9, policy=policy, signal=signal, target=1.0, limits=())
    state, now, known = AutoscalerState(), T0, "in_flight" if signal is Signal.REQUESTS_PER_GPU else signal.value
    for value in before:
        now += 5.0
        reading = replace(BUSY, at=now, ready=current, gpus=1.0, **{known: value})
        _, state = decide(scale, state, reading, now, current=current)
    for _ in range(100):
        now += 5.0
        decision, state = decide(scale, state, replace(UNKNOWN, at=now, ready=current), now, current=current)
        assert (decision.wanted, decision.reason) == (current, Reason.UNKNOWN)
        assert decision.why == f"{signal} is not known: no replica is removed"
    seen = []
    for _ in range(100):
        now += 5.0
        reading = replace(BUSY, at=now, ready=current, gpus=1.0, **{known: 0.01})
        decision, state = decide(scale, state, reading, now, current=current)
        seen.append(decision.wanted)
    assert seen[-1] <= max(1, current // 2)


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(
    ("signal", "more"),
    [
        (Signal.PREDICTED_TTFT_S, {"predicted_ttft_s": 3.0}),
        (Signal.PREDICTED_TPOT_S, {"predicted_tpot_s": 3.0}),
        (Signal.REQUESTS_PER_GPU, {"in_flight": 12.0, "gpus": 2.0}),
    ],
)
def test_predicted_latency_and_gpu_signals_can_be_limited_under_every_policy(
    policy: Policy, signal: Signal, more: dict[str, float]
) -> None:
    scale = Scale(9, policy=policy, ttft_s=9.0, tpot_s=1.0, target=100.0, limits=(Limit(signal, 1.0, 20.0),))
    state, seen = AutoscalerState(), []
    for tick in range(6):
        reading = replace(BUSY, at=T0 + tick * 5, ready=2, **more)
        decision, state = decide(scale, state, reading, reading.at, current=2)
        seen.append(decision)

    assert [each.wanted for each in seen[:4]] == [2] * 4
    assert (seen[4].wanted, seen[4].reason) == (6, Reason.SIGNAL)
    assert seen[4].why.startswith(f"{signal} of 3 has been above 1 for 20 s")
    assert all(each.figures[signal] == 3.0 for each in seen)


PER_S = st.floats(0.0, 60.0)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(PER_S, st.integers(1, 30), st.booleans()), min_size=1, max_size=4),
    st.sampled_from(list(Policy)),
    st.integers(0, 3),
    st.integers(3, 9),
)
def test_decisions_stay_within_bounds_and_memory_survives(
    parts: list[tuple[float, int, bool]], policy: Policy, low: int, high: int
) -> None:
    model = Model(Scale(high, low, policy, ttft_s=1.0, to_zero_after_s=60.0), replicas=low)
    for per_s, ticks, known in parts:
        for _ in range(ticks):
            before = model.replicas
            decision = model.look(per_s, known)
            assert low <= decision.wanted <= high
            assert known or decision.wanted >= before
            assert decision.why
    assert len(msgspec.json.encode(model.state)) < 65_536


def more(reading: Reading, by: int, busier: float) -> Reading:
    return replace(
        reading,
        arrivals=reading.arrivals + by,
        prompt_tokens=reading.prompt_tokens + 500 * by,
        waiting=reading.waiting + by,
        in_flight=reading.in_flight * busier + by,
        backlog_tokens=reading.backlog_tokens + 500 * by,
        kv_use=min(1.0, (reading.kv_use or 0.0) * busier),
        ttft_s=(reading.ttft_s or 0.0) * busier,
        tpot_s=(reading.tpot_s or 0.0) * busier,
    )


@settings(max_examples=15, deadline=None)
@given(PER_S, st.integers(1, 60), st.integers(0, 100), st.floats(1.0, 5.0))
def test_larger_load_never_wants_fewer_replicas(per_s: float, ticks: int, by: int, busier: float) -> None:
    model = Model(Scale(30, ttft_s=1.0), replicas=3)
    looks(model, per_s, ticks)
    reading = replace(BUSY, at=model.now + 5.0, ready=model.ready, pending=model.replicas - model.ready)

    less, _ = decide(model.scale, model.state, reading, reading.at, current=model.replicas)
    much, _ = decide(model.scale, model.state, more(reading, by, busier), reading.at, current=model.replicas)

    assert much.wanted >= less.wanted
