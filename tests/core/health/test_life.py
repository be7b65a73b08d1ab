"""The state machine of a device: effects of errors and readings, and that unknown data has none."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.health import (
    NOTHING_EXCLUDED,
    OUT,
    DeviceEvent,
    DeviceReading,
    DeviceState,
    Excluded,
    Health,
    HealthRules,
    Recovery,
    Remedy,
    Signal,
    Throttle,
    classify,
    release,
    standing,
    step,
)
from forebay.core.health.life import NEXT, move

RULES = HealthRules(calm_s=100.0)
FINE = DeviceReading("g", life="boot-1", throttles=(), ecc_errors=0, recovery=Recovery.NONE)
NEW = DeviceState("g")
H = Health


def hurt(xid: int, at: float = 10.0, state: DeviceState = NEW, reading: DeviceReading | None = FINE) -> DeviceState:
    return step(state, reading, [DeviceEvent(at, "g", xid)], at, RULES)[0]


def later(state: DeviceState, now: float, reading: DeviceReading | None = FINE) -> DeviceState:
    return step(state, reading, (), now, RULES)[0]


@pytest.mark.parametrize(
    ("xid", "remedy", "after"),
    [
        (43, Remedy.IGNORE, H.HEALTHY),
        (45, Remedy.IGNORE, H.HEALTHY),
        (63, Remedy.IGNORE, H.HEALTHY),
        (13, Remedy.RESTART, H.HEALTHY),
        (31, Remedy.RESTART, H.HEALTHY),
        (94, Remedy.RESTART, H.HEALTHY),
        (74, Remedy.DRAIN, H.DRAINING),
        (149, Remedy.DRAIN, H.DRAINING),
        (48, Remedy.RESET, H.QUARANTINED),
        (79, Remedy.RESET, H.QUARANTINED),
        (95, Remedy.RESET, H.QUARANTINED),
        (119, Remedy.RESET, H.QUARANTINED),
        (64, Remedy.REPLACE, H.QUARANTINED),
        (54, Remedy.DRAIN, H.DRAINING),
        (155, Remedy.RESET, H.QUARANTINED),
        (9999, Remedy.IGNORE, H.HEALTHY),
    ],
)
def test_xid_has_the_effect_of_its_class(xid: int, remedy: Remedy, after: Health) -> None:
    state, [effect] = step(NEW, None, [DeviceEvent(10.0, "g", xid)], 10.0, RULES)

    assert (state.state, effect.remedy, effect.after, effect.xid) == (after, remedy, after, xid)
    assert f"XID {xid}: " in effect.why
    assert state.out is (after in OUT)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", Remedy.RESET),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", Remedy.RESET),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", Remedy.DRAIN),
        ("GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", Remedy.RESET),
        ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", Remedy.IGNORE),
        ("", Remedy.IGNORE),
    ],
)
def test_recovery_action_in_the_driver_message_applies(text: str, remedy: Remedy) -> None:
    assert classify(154, text).remedy is remedy


@pytest.mark.parametrize(
    ("numbers", "remedy"),
    [
        ((8, 11, 13, 25, 31, 32, 60, 69, 80, 94), Remedy.RESTART),
        ((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), Remedy.RESTART),
        ((68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139), Remedy.RESTART),
        ((46, 62, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158), Remedy.RESET),
        ((43, 44, 63, 92, 93, 121, 137, 157), Remedy.IGNORE),
    ],
)
def test_xid_remedy_equals_the_immediate_action_of_nvidias_catalogue(
    numbers: tuple[int, ...], remedy: Remedy
) -> None:
    """RESTART_APP, RESET_GPU and IGNORE of NVIDIA's XID catalogue, column `Immediate Action`, October 2025."""
    assert {number: classify(number).remedy for number in numbers} == dict.fromkeys(numbers, remedy)


@pytest.mark.parametrize("number", range(144, 151))
def test_nvlink_xid_severity_is_read_from_the_log_line(number: int) -> None:
    assert classify(number, "pid=1, NETIR Nonfatal XC0 i0 Link 08").remedy is Remedy.IGNORE
    assert classify(number, "pid=1, NETIR Fatal XC0 i0 Link 08").remedy is Remedy.RESET
    assert classify(number).remedy is Remedy.DRAIN
    assert classify(74, "NVLink: fatal error detected on link 2").remedy is Remedy.DRAIN


def test_repeated_reports_of_one_error_count_once() -> None:
    burst = [DeviceEvent(10.0 + n, "g", 94) for n in range(4)]
    state, effects = step(NEW, FINE, burst, 14.0, RULES)
    assert len(effects) == 1
    assert step(state, FINE, [DeviceEvent(15.0, "g", 94)], 15.0, RULES)[1] == ()
    assert len(step(state, FINE, [DeviceEvent(60.0, "g", 94)], 60.0, RULES)[1]) == 1
    twice_told = [DeviceEvent(10.0 + n / 10, "g", xid) for n, xid in enumerate((94, 45, 94, 45))]
    assert [effect.xid for effect in step(NEW, FINE, twice_told, 11.0, RULES)[1]] == [94, 45]


def test_repeated_contained_hardware_errors_drain_a_device_and_program_errors_do_not() -> None:
    hardware, programs = NEW, NEW
    for n in range(3):
        assert hardware.state is H.HEALTHY
        hardware, programs = hurt(94, 10.0 + 100 * n, hardware), hurt(31, 10.0 + 100 * n, programs)
    assert (hardware.state, programs.state) == (H.DRAINING, H.HEALTHY)
    rare = NEW
    for n in range(6):
        rare = hurt(94, 10.0 + 3000 * n, rare)
    assert rare.state is H.HEALTHY


def test_drained_device_is_retried_after_its_rest_and_serves_after_probation() -> None:
    state = hurt(74, 10.0)
    assert later(state, 109.0).state is H.DRAINING
    state = later(state, 110.0)
    assert (state.state, state.why) == (H.RECOVERING, "no error for 100 s or more")
    assert later(state, 209.0).state is H.RECOVERING
    state = later(state, 210.0)
    assert (state.state, state.remedy, state.why) == (H.HEALTHY, Remedy.IGNORE, "no error during probation")


def test_error_during_the_rest_restarts_it_and_each_relapse_doubles_it() -> None:
    state = hurt(74, 50.0, hurt(74, 10.0))
    assert later(state, 149.0).state is H.DRAINING
    state = later(state, 150.0)
    again = hurt(74, 160.0, state)
    assert (again.state, again.relapses) == (H.DRAINING, 1)
    assert later(again, 359.0).state is H.DRAINING
    assert later(again, 360.0).state is H.RECOVERING
    assert hurt(74, 100_000.0, later(state, 250.0)).relapses == 0


def test_state_changes_only_with_readings() -> None:
    state = hurt(74, 10.0)
    assert later(state, 1e6, None) == state
    assert later(NEW, 1e6, None) == NEW
    assert later(NEW, 10.0, DeviceReading("g")).state is H.HEALTHY


@pytest.mark.parametrize(
    "mended",
    [replace(FINE, life="boot-2"), replace(FINE, ecc_errors=0)],
    ids=["another life", "counters that began anew"],
)
def test_device_needing_a_reset_serves_again_after_it(mended: DeviceReading) -> None:
    sick = replace(FINE, ecc_errors=3)
    state = hurt(95, 20.0, later(NEW, 5.0, sick), sick)
    assert later(state, 1e6, sick).state is H.QUARANTINED
    assert later(state, 30.0, mended).state is H.RECOVERING


def test_recovery_action_of_the_driver_excludes_a_device_until_it_is_cleared() -> None:
    asks = replace(FINE, recovery=Recovery.RESET)
    state, [effect] = step(NEW, asks, (), 10.0, RULES)
    assert (state.state, effect.why) == (H.QUARANTINED, "the driver asks for a reset")
    assert step(state, asks, (), 11.0, RULES)[1] == ()
    assert later(state, 12.0).state is H.RECOVERING
    assert later(NEW, 10.0, replace(FINE, recovery=Recovery.DRAIN)).state is H.DRAINING


def test_lost_device_stays_out_when_it_reappears() -> None:
    lost = replace(FINE, lost=True)
    state = later(later(NEW, 1.0), 10.0, lost)
    assert (state.state, state.remedy) == (H.QUARANTINED, Remedy.RESET)
    assert later(state, 1e6).state is H.QUARANTINED
    assert later(state, 20.0, replace(lost, life="boot-2")).state is H.QUARANTINED
    assert later(state, 20.0, replace(FINE, life="boot-2")).state is H.RECOVERING


def test_device_failing_after_two_resets_waits_for_an_operator() -> None:
    state = NEW
    for n in range(3):
        state = hurt(79, 10.0 + 100 * n, state, replace(FINE, life=f"boot-{n}"))
        assert state.remedy is (Remedy.RESET if n < 2 else Remedy.REPLACE)
        state = later(state, 60.0 + 100 * n, replace(FINE, life=f"boot-{n + 1}"))
    assert state.state is H.QUARANTINED


def test_broken_memory_needs_an_operator_and_worse_errors_replace_the_reason() -> None:
    broken = replace(FINE, remap_failed=True)
    state = later(hurt(74), 20.0, broken)
    assert (state.state, state.remedy) == (H.QUARANTINED, Remedy.REPLACE)
    assert state.why == "a row of its memory could not be remapped"
    assert hurt(74, 30.0, state, broken).why == state.why
    assert standing(broken)
    assert not standing(FINE)
    assert later(state, 1e6, replace(FINE, life="boot-9")).state is H.QUARANTINED
    released = release(state, 40.0, "exchanged", RULES)
    assert (released.state, released.why) == (H.RECOVERING, "exchanged")
    assert later(released, 140.0).state is H.HEALTHY
    with pytest.raises(KeyError):
        release(NEW, 40.0, "", RULES)


def test_unreported_uncorrected_ecc_errors_count_as_contained() -> None:
    state = later(NEW, 1.0)
    _, [effect] = step(state, replace(FINE, ecc_errors=2), (), 100.0, RULES)
    assert (effect.remedy, effect.why) == (Remedy.RESTART, "2 uncorrected ECC errors")
    reported = hurt(94, 99.0, state)
    assert step(reported, replace(FINE, ecc_errors=2), (), 100.0, RULES)[1] == ()


def slow(ratio: float) -> DeviceReading:
    return replace(FINE, throttles=(Throttle.HEAT,), clock_mhz=1000 * ratio, clock_max_mhz=1000.0)


def test_throttled_device_is_degraded_with_a_lower_weight_until_its_clock_recovers() -> None:
    state, [effect] = step(later(NEW, 0.0), slow(0.5), (), 100.0, RULES)
    assert (state.state, state.weight, effect.after) == (H.DEGRADED, 0.5, H.DEGRADED)
    assert state.why == "runs at 50% of its clock: heat"
    state = later(state, 101.0, slow(0.52))
    assert state.weight == 0.5
    now = 101.0
    while state.state is H.DEGRADED:
        now += 2.0
        state = later(state, now)
    assert (state.state, state.weight) == (H.HEALTHY, 1.0)
    assert 120.0 < now < 160.0


def test_weight_has_hysteresis_and_stays_in_bounds() -> None:
    assert later(NEW, 100.0, slow(0.93)).weight == 1.0
    assert later(NEW, 100.0, slow(0.01)).weight == 0.1
    assert later(NEW, 100.0, replace(slow(0.5), clock_mhz=None)).weight == 1.0
    assert later(NEW, 100.0, replace(slow(0.5), throttles=(Throttle.POWER_CAP,))).weight == 1.0
    edge = later(NEW, 100.0, slow(0.89))
    assert edge.weight == 0.9
    assert later(edge, 200.0, slow(0.94)).weight == 0.9
    slowed_in_quarantine = later(hurt(64), 500.0, slow(0.5))
    assert (slowed_in_quarantine.state, slowed_in_quarantine.weight) == (H.QUARANTINED, 0.5)
    faded = later(later(NEW, 100.0, slow(0.5)), 103.0)
    assert (faded.state, faded.weight) == (H.DEGRADED, 0.6)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 13, 43, 48, 64, 74, 79, 94]),
            st.floats(0.1, 500.0),
            st.sampled_from([None, FINE, slow(0.4), replace(FINE, lost=True), replace(FINE, life="boot-2")]),
        ),
        max_size=12,
    )
)
def test_health_states_and_weights_stay_valid_after_any_observations(
    history: list[tuple[int, float, DeviceReading | None]],
) -> None:
    state, now = NEW, 1000.0
    for xid, gap_s, reading in history:
        now += gap_s
        events = [DeviceEvent(now, "g", xid)] if xid else []
        before = state
        state, effects = step(state, reading, events, now, RULES)
        assert 0.1 <= state.weight <= 1.0
        assert state.remedy >= Remedy.DRAIN or not state.out
        if reading is None and not events:
            assert state == before
        if before.state is H.QUARANTINED and before.remedy is Remedy.REPLACE:
            assert state.state is H.QUARANTINED
        assert (state.state is before.state) or effects


def test_health_transitions_allow_failure_from_every_state_and_recovery_only_by_signal() -> None:
    for state in Health:
        assert move(state, Signal.CONDEMNED) is H.QUARANTINED
        assert (state, Signal.RELEASED) in NEXT or state not in OUT
    assert (H.QUARANTINED, Signal.CALM) not in NEXT


def test_excluded_devices_have_a_reason() -> None:
    excluded = Excluded({"a": "drained"}, {"g": "XID 79"})
    assert excluded.why("a", ()) == "drained"
    assert excluded.why("b", ("f", "g")) == "XID 79"
    assert excluded.why("b", ("f",)) == ""
    assert NOTHING_EXCLUDED.why("a", ("g",)) == ""
