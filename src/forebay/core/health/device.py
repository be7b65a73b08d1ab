"""What becomes of a device by what is seen of it: `step`, a pure function of its state, readings and events.

Unknown is not sick: without a reading nothing changes. Nor is it well: nothing recovers unseen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from forebay.core.health.life import OUT, Health, Signal, move
from forebay.core.health.throttle import clock_ratio, smoothed, weight
from forebay.core.health.values import DeviceEvent, DeviceReading, Recovery
from forebay.core.health.xid import Remedy, classify

DUPLICATE_S: Final = 5.0
"""The same error again within this time is the same error: drivers report one several times, in several places."""
DOUBLINGS_MAX: Final = 5
"""The rest after an error doubles with each relapse, up to 32 times."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """Durations, seconds, and bounds."""

    calm_s: float = 600.0
    """Without an error for so long, a drained device is tried again; then it is on probation for as long."""
    restarts_max: int = 3
    """Contained hardware errors …"""
    restarts_window_s: float = 3600.0
    """… within this time are one that asks for a rest."""
    forget_s: float = 86_400.0
    """An error so long after the last recovery is no relapse."""
    resets_max: int = 2
    """After so many relapses a reset does not help any more: a person has to look."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What is remembered of a device. Times are wall time: it is kept over restarts of control and of the machine."""

    device: str
    state: Health = Health.HEALTHY
    since: float = 0.0
    why: str = ""
    remedy: Remedy = Remedy.IGNORE
    """What was asked for by what took it out."""
    weight: float = 1.0
    clock: float = 1.0
    """Mean clock ratio."""
    read_at: float = 0.0
    calm_at: float = 0.0
    """When its rest, or its probation, is over if nothing happens until then."""
    relapses: int = 0
    recovered_at: float = 0.0
    restarts: tuple[float, ...] = ()
    """When contained hardware errors were seen, the latest ones."""
    lately: tuple[tuple[int, float], ...] = ()
    """XIDs of the last seconds, each with when it was reported last."""
    life: str = ""
    ecc_errors: int | None = None
    asked: bool = False
    """The driver has asked for a reset since it was taken out."""

    @property
    def out(self) -> bool:
        """Nothing may run there."""
        return self.state in OUT


class Fault(NamedTuple):
    """Something is wrong. `xid` is 0 where a reading says so."""

    at: float
    remedy: Remedy
    xid: int
    why: str
    hardware: bool = True


class Effect(NamedTuple):
    """What a step has found: a change of state, a restart of what runs there, or only something to tell."""

    device: str
    remedy: Remedy
    xid: int
    before: Health
    after: Health
    why: str
    lost: bool = False
    """What ran there when it happened cannot go on."""


def step(
    state: DeviceState, reading: DeviceReading | None, events: Sequence[DeviceEvent], now: float, rules: HealthRules
) -> tuple[DeviceState, tuple[Effect, ...]]:
    """The state after what was seen at `now`, wall time, and what it means. None: it could not be read."""
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
    """A person lets it serve again, on probation. Raises KeyError if it does."""
    return _tried(state, Signal.RELEASED, why, now, rules)


def standing(reading: DeviceReading) -> str:
    """What is still wrong with a device, so that it would be taken out again at once; empty: nothing is."""
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
    """What a reading says is wrong, and was not known."""
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
        yield Fault(now, Remedy.RESET, 0, "the driver cannot reach it: it is lost")
    if reading.recovery in (Recovery.RESET, Recovery.REBOOT):
        yield Fault(now, Remedy.RESET, 0, f"the driver asks for a {reading.recovery}")
    if reading.recovery is Recovery.DRAIN:
        yield Fault(now, Remedy.DRAIN, 0, "the driver asks to take work off it")


def _hit(state: DeviceState, fault: Fault, now: float, rules: HealthRules) -> tuple[DeviceState, Remedy]:
    """The state after a fault, and what is done about it."""
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
    """Out of its rest, or its probation, if it is time. `state` has taken in what is wrong by now."""
    if state.state is Health.QUARANTINED and state.remedy is Remedy.RESET:
        if not standing(reading) and _was_reset(state, reading):
            return _tried(state, Signal.MENDED, "it was reset", now, rules)
    elif state.state in (Health.DRAINING, Health.RECOVERING) and now >= state.calm_at and not standing(reading):
        if state.state is Health.DRAINING:
            return _tried(state, Signal.CALM, f"no error for {rules.calm_s:.0f} s or more", now, rules)
        after = move(state.state, Signal.CALM)
        return replace(state, state=after, since=now, why="no error on probation", remedy=Remedy.IGNORE)
    return state


def _was_reset(state: DeviceState, reading: DeviceReading) -> bool:
    """Whether it was, since it was taken out: another life, counters that began anew, or the driver is content."""
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
    """The weight by its clock, and what a device in service is called for it."""
    ratio = clock_ratio(reading)
    if ratio is None:
        return replace(state, read_at=now)
    mean = smoothed(state.clock, ratio, now - state.read_at)
    state = replace(state, clock=mean, read_at=now, weight=weight(state.weight, mean))
    slow = state.weight < 1.0
    if slow and state.state is Health.HEALTHY:
        by = ", ".join(reading.throttles or ()) or "nothing any more"
        why = f"runs at {mean:.0%} of its clock: {by}"
        return replace(state, state=move(state.state, Signal.SLOWED), since=now, why=why)
    if not slow and state.state is Health.DEGRADED:
        return replace(state, state=move(state.state, Signal.EASED), since=now, why="runs at full clock")
    return state
