"""The health state machine of a device: `step`, a pure function of its state, readings and events.

Unknown is neither sick nor healthy: without a reading nothing changes, and nothing recovers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from forebay.core.health.life import OUT, Health, Signal, move
from forebay.core.health.throttle import clock_ratio, smoothed, weight
from forebay.core.health.values import DeviceEvent, DeviceReading, Recovery
from forebay.core.health.xid import Remedy, classify

DUPLICATE_S: Final = 5.0
"""The same error within this time is a duplicate: drivers report errors repeatedly, in several places."""
DOUBLINGS_MAX: Final = 5
"""The calm period doubles with each relapse, up to 32 times."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """Durations, seconds, and bounds."""

    calm_s: float = 600.0
    """After this long without an error, a drained device is tried again, on probation for as long again."""
    restarts_max: int = 3
    """This many contained hardware errors …"""
    restarts_window_s: float = 3600.0
    """… within this time drain the device."""
    forget_s: float = 86_400.0
    """An error this long after the last recovery is not a relapse."""
    resets_max: int = 2
    """After this many relapses a reset is no longer enough: an operator must look at it."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The state of a device. Times are wall time: it outlives restarts of control and of the machine."""

    device: str
    state: Health = Health.HEALTHY
    since: float = 0.0
    why: str = ""
    remedy: Remedy = Remedy.IGNORE
    """The remedy required by the error that took it out of service."""
    weight: float = 1.0
    clock: float = 1.0
    """Mean clock ratio."""
    read_at: float = 0.0
    calm_at: float = 0.0
    """When its calm period or probation ends, if nothing happens until then."""
    relapses: int = 0
    recovered_at: float = 0.0
    restarts: tuple[float, ...] = ()
    """Times of the latest contained hardware errors."""
    lately: tuple[tuple[int, float], ...] = ()
    """Recent XIDs, each with the time of its last report."""
    life: str = ""
    ecc_errors: int | None = None
    asked: bool = False
    """The driver has asked for a reset since it was taken out of service."""

    @property
    def out(self) -> bool:
        """It is out of service."""
        return self.state in OUT


class Fault(NamedTuple):
    """A fault. `xid` is 0 if it comes from a reading."""

    at: float
    remedy: Remedy
    xid: int
    why: str
    hardware: bool = True


class Effect(NamedTuple):
    """The result of a step: a state change, a restart of what runs there, or only information."""

    device: str
    remedy: Remedy
    xid: int
    before: Health
    after: Health
    why: str
    lost: bool = False
    """The processes that ran there at that time cannot continue."""


def step(
    state: DeviceState, reading: DeviceReading | None, events: Sequence[DeviceEvent], now: float, rules: HealthRules
) -> tuple[DeviceState, tuple[Effect, ...]]:
    """The state after the observations at `now` (wall time), and their effects. `reading` None: it could not be
    read."""
    effects = []
    faults = [*_new(state, events), *(_levels(state, reading, now) if reading else ())]
    for fault in sorted(faults, key=lambda fault: fault.at):
        before = state.state
        state, remedy = _hit(state, fault, now, rules)
        lost = fault.remedy is Remedy.RESTART
        effects.append(Effect(state.device, remedy, fault.xid, before, state.state, fault.why, lost))
    if reading is not None:
        before = state.state
        state = _recovered(state, reading, now, rules)
        state = _weighed(state, reading, now)
        if state.state is not before:
            effects.append(Effect(state.device, Remedy.IGNORE, 0, before, state.state, state.why))
        state = replace(
            state,
            life=reading.life or state.life,
            ecc_errors=state.ecc_errors if reading.ecc_errors is None else reading.ecc_errors,
            asked=state.out and (state.asked or reading.recovery not in (None, Recovery.NONE)),
        )
    if events:
        state = replace(state, lately=_lately(state, events))
    return state, tuple(effects)


def release(state: DeviceState, now: float, why: str, rules: HealthRules) -> DeviceState:
    """An operator returns it to service, on probation. Raises KeyError if it is in service."""
    return _tried(state, Signal.RELEASED, why, now, rules)


def standing(reading: DeviceReading) -> str:
    """What is still wrong with a device, so that it would be taken out again at once; empty: nothing."""
    return next((fault.why for fault in _faults(reading, 0.0)), "")


def _new(state: DeviceState, events: Sequence[DeviceEvent]) -> Iterator[Fault]:
    reported = dict(state.lately)
    for event in sorted(events, key=lambda event: event.at):
        if event.at - reported.get(event.xid, -DUPLICATE_S) >= DUPLICATE_S:
            row = classify(event.xid, event.text)
            yield Fault(event.at, row.remedy, event.xid, f"XID {event.xid}: {row.text}", row.hardware)
        reported[event.xid] = event.at


def _lately(state: DeviceState, events: Sequence[DeviceEvent]) -> tuple[tuple[int, float], ...]:
    reported = {**dict(state.lately), **{event.xid: event.at for event in sorted(events, key=lambda event: event.at)}}
    newest = max(reported.values())
    return tuple(sorted((xid, at) for xid, at in reported.items() if newest - at < DUPLICATE_S))


def _levels(state: DeviceState, reading: DeviceReading, now: float) -> Iterator[Fault]:
    """New faults in a reading."""
    for fault in _faults(reading, now):
        if not state.out or fault.remedy > state.remedy:
            yield fault
    known, seen = state.ecc_errors, reading.ecc_errors
    told = any(now - at < DUPLICATE_S for _, at in state.lately)
    if known is not None and seen is not None and seen > known and not told:
        yield Fault(now, Remedy.RESTART, 0, f"{seen - known} uncorrected ECC errors")


def _faults(reading: DeviceReading, now: float) -> Iterator[Fault]:
    if reading.remap_failed:
        yield Fault(now, Remedy.REPLACE, 0, "a row of its memory could not be remapped")
    if reading.lost:
        yield Fault(now, Remedy.RESET, 0, "the driver cannot reach it")
    if reading.recovery in (Recovery.RESET, Recovery.REBOOT):
        yield Fault(now, Remedy.RESET, 0, f"the driver asks for a {reading.recovery}")
    if reading.recovery is Recovery.DRAIN:
        yield Fault(now, Remedy.DRAIN, 0, "the driver asks to drain it")


def _hit(state: DeviceState, fault: Fault, now: float, rules: HealthRules) -> tuple[DeviceState, Remedy]:
    """The state after a fault, and the remedy."""
    remedy = fault.remedy
    if remedy is Remedy.RESTART and fault.hardware:
        lately = (*(at for at in state.restarts if fault.at - at < rules.restarts_window_s), fault.at)
        state = replace(state, restarts=lately[-rules.restarts_max :])
        if len(lately) >= rules.restarts_max:
            remedy = Remedy.DRAIN
    if remedy < Remedy.DRAIN:
        return state, remedy
    relapses = state.relapses
    if not state.out:
        relapses = relapses + 1 if state.recovered_at and now - state.recovered_at < rules.forget_s else 0
    if remedy is Remedy.RESET and relapses >= rules.resets_max:
        remedy = Remedy.REPLACE
    after = move(state.state, Signal.FAILED if remedy is Remedy.DRAIN else Signal.CONDEMNED)
    rest_s = rules.calm_s * 2.0 ** min(relapses, DOUBLINGS_MAX)
    worst = max(remedy, state.remedy) if state.out else remedy
    why = fault.why if worst == remedy or not state.why else state.why
    since = state.since if after is state.state else now
    out = replace(state, state=after, since=since, why=why, remedy=worst, calm_at=now + rest_s, relapses=relapses)
    return out, remedy


def _recovered(state: DeviceState, reading: DeviceReading, now: float, rules: HealthRules) -> DeviceState:
    """End its calm period or probation if it is time. `state` already includes the current faults."""
    if state.state is Health.QUARANTINED and state.remedy is Remedy.RESET:
        if not standing(reading) and _was_reset(state, reading):
            return _tried(state, Signal.MENDED, "it was reset", now, rules)
    elif state.state in (Health.DRAINING, Health.RECOVERING) and now >= state.calm_at and not standing(reading):
        if state.state is Health.DRAINING:
            return _tried(state, Signal.CALM, f"no error for {rules.calm_s:.0f} s or more", now, rules)
        after = move(state.state, Signal.CALM)
        return replace(state, state=after, since=now, why="no error during probation", remedy=Remedy.IGNORE)
    return state


def _was_reset(state: DeviceState, reading: DeviceReading) -> bool:
    """Whether it was reset since it was taken out: another `life`, restarted counters, or a satisfied driver."""
    if state.life and reading.life and reading.life != state.life:
        return True
    if state.asked and reading.recovery is Recovery.NONE:
        return True
    return state.ecc_errors is not None and reading.ecc_errors is not None and reading.ecc_errors < state.ecc_errors


def _tried(state: DeviceState, signal: Signal, why: str, now: float, rules: HealthRules) -> DeviceState:
    after = move(state.state, signal)
    return replace(
        state, state=after, since=now, why=why, calm_at=now + rules.calm_s, recovered_at=now, restarts=(), asked=False
    )


def _weighed(state: DeviceState, reading: DeviceReading, now: float) -> DeviceState:
    """Update the weight from its clock, and healthy or degraded with it."""
    ratio = clock_ratio(reading)
    if ratio is None:
        return replace(state, read_at=now)
    mean = smoothed(state.clock, ratio, now - state.read_at)
    state = replace(state, clock=mean, read_at=now, weight=weight(state.weight, mean))
    slow = state.weight < 1.0
    if slow and state.state is Health.HEALTHY:
        by = ", ".join(reading.throttles or ()) or "no current reason"
        why = f"runs at {mean:.0%} of its clock: {by}"
        return replace(state, state=move(state.state, Signal.SLOWED), since=now, why=why)
    if not slow and state.state is Health.DEGRADED:
        return replace(state, state=move(state.state, Signal.EASED), since=now, why="runs at full clock")
    return state
