"""How many replicas a model gets: the policy's recommendation, adjusted by rules common to all policies.

Bounds and schedule, scaling to zero, signal limits, windows and rates are the same for every policy. Replicas are
never removed while the load is unknown, or has been known again for less than the window of `down`.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Final

from forebay.core.scaling import learned
from forebay.core.scaling.rules.table import advise
from forebay.core.scaling.settings import Pace, Policy, Scale, Signal
from forebay.core.scaling.state import AutoscalerState, WishRange
from forebay.core.scaling.values import Decision, Reading, Reason, Wish

GAP_S: Final = 30.0
"""After a longer time without readings, windows start over."""
WISHES_MAX: Final = 32
"""Number of parts in which a window is remembered."""
CHANGES_MAX: Final = 32
USUAL: Final = (Reason.LOAD, Reason.FORECAST, Reason.RULE, Reason.SPARE)
"""Reasons that are replaced by STEADY if nothing changes."""
CALM: Final = 12
TURNS_MAX: Final = 1
"""A single replica is removed only if additions and removals did not alternate more often than this within CALM
windows of `down` (an hour by default). With the addition that may follow at any time, a load between two numbers of
replicas changes direction at most twice an hour, whatever its noise."""


def decide(
    scale: Scale, state: AutoscalerState, reading: Reading | None, now: float, *, current: int
) -> tuple[Decision, AutoscalerState]:
    """The desired number of replicas instead of `current`; `reading` is None if the load is unknown."""
    low, high = bounds(scale, now)
    lead_s = state.learned.lead_s if scale.lead_s is None else scale.lead_s
    low = max(low, min(bounds(scale, now + lead_s)[0], high))  # scheduled replicas are ready when their hours begin
    if reading is None:
        return _unknown(scale, low, current), state
    state = _watched(scale, _reset_clock(state, now), reading, now)
    wish, state = _wish(scale, state, reading, now, current)
    wish = _limited(scale, state, reading, wish, current)
    if current == 0 and is_asked(reading):
        wish = max(Wish(1, Reason.WAKE, "a request arrived and there is no replica"), wish, key=_wanted)
    elif low == 0:
        wish = _idle(scale, state, wish, now, current)
    wish = _bounded(wish, low, high)
    state = _remembered(scale, state, wish.wanted, now)
    if low <= current <= high and current and wish.reason is not Reason.IDLE:
        wish = _paced(scale, state, wish, now, current)
    if wish.wanted != current:
        changes = (*state.changes, (now, wish.wanted - current))[-CHANGES_MAX:]
        state = replace(state, changes=changes)
    return Decision(wish.wanted, wish.reason, wish.why, {**wish.figures, "min": low, "max": high}), state


def bounds(scale: Scale, now: float) -> tuple[int, int]:
    """The fewest and the most replicas at that time."""
    for hours in scale.schedule:
        if hours.hold(now):
            return (
                scale.min if hours.min is None else hours.min,
                scale.max if hours.max is None else hours.max,
            )
    return scale.min, scale.max


def _unknown(scale: Scale, low: int, current: int) -> Decision:
    """The current number. Configured minimums still apply; a scheduled maximum does not."""
    wanted = min(max(current, low), scale.most)
    if wanted == current:
        return Decision(wanted, Reason.UNKNOWN, "the load is not known: no replica is removed", {"min": low})
    name = "min" if wanted > current else "max"
    return Decision(wanted, Reason.BOUND, f"the load is not known, but `{name}` is {wanted} now", {"min": low})


def _reset_clock(state: AutoscalerState, now: float) -> AutoscalerState:
    """If the clock was set back, windows start over: they would last until it is as late again."""
    if state.known_at is None or now >= state.known_at - GAP_S:
        return state
    return AutoscalerState(learned=learned.set_back(state.learned, now))


def _watched(scale: Scale, state: AutoscalerState, reading: Reading, now: float) -> AutoscalerState:
    """Update durations: since the last request, and since when limits are exceeded."""
    fresh = state.known_at is None or now - state.known_at > GAP_S
    before = state.above if len(state.above) == len(scale.limits) else (None,) * len(scale.limits)
    above = tuple(
        (since if since is not None else reading.at)
        if (value_of(limit.signal, reading) or 0.0) > limit.above
        else None
        for limit, since in zip(scale.limits, before, strict=True)
    )
    starting = reading.ready == 0 and reading.pending > 0
    asked = state.asked_at is None or starting or is_asked(reading)
    return replace(
        state,
        known_at=now,
        asked_at=now if asked else state.asked_at,
        above=above,
        since=now if fresh else state.since,
        wishes=() if fresh else state.wishes,
        learned=learned.without_load(state.learned) if fresh else state.learned,
    )


def is_asked(reading: Reading) -> bool:
    """Whether there is, or was, any request."""
    return reading.arrivals > 0 or reading.waiting > 0 or reading.in_flight > 0


def value_of(signal: Signal, reading: Reading) -> float | None:
    """The value of a signal; None: unknown.

    Measured times are 0 without requests: an idle model may shrink.
    """
    replicas = max(reading.ready, 1)
    match signal:
        case Signal.CONCURRENCY:
            return reading.in_flight / replicas
        case Signal.QUEUE:
            return reading.waiting / replicas
        case Signal.BACKLOG_TOKENS:
            return reading.backlog_tokens / replicas
        case Signal.KV_USE:
            return reading.kv_use
        case Signal.BUSY:
            return reading.busy
        case Signal.DUTY:
            return reading.duty
        case Signal.TTFT_S:
            return _measured(reading.ttft_s, reading)
        case Signal.TPOT_S:
            return _measured(reading.tpot_s, reading)
        case Signal.PREDICTED_TTFT_S:
            return reading.predicted_ttft_s
        case Signal.PREDICTED_TPOT_S:
            return reading.predicted_tpot_s
        case _:
            return reading.in_flight / (replicas * reading.gpus) if reading.gpus > 0 else None


def _measured(value: float | None, reading: Reading) -> float | None:
    return 0.0 if value is None and not is_asked(reading) else value


def _wish(
    scale: Scale, state: AutoscalerState, reading: Reading, now: float, current: int
) -> tuple[Wish, AutoscalerState]:
    if scale.policy is Policy.FOREBAY:
        wish, known = learned.wish(scale, state.learned, reading, now, current)
        return wish, replace(state, learned=known)
    value = value_of(scale.signal, reading)
    if value is None and scale.policy is not Policy.SLO:  # which looks at no signal
        why = f"{scale.signal} is not known: no replica is removed"
        return Wish(current, Reason.UNKNOWN, why), state
    value = value or 0.0
    wanted, why, rules = advise(scale, state.rules, reading, value, current)
    return Wish(wanted, Reason.RULE, why, {str(scale.signal): value}), replace(state, rules=rules)


def _limited(scale: Scale, state: AutoscalerState, reading: Reading, wish: Wish, current: int) -> Wish:
    """At least as many replicas as bring signals below their limits, if these fall with the number of replicas.

    More if a signal exceeded its limit for long enough; and never so few that it would.
    """
    seen = {str(limit.signal): value_of(limit.signal, reading) for limit in scale.limits}
    known = {name: value for name, value in seen.items() if value is not None}
    wish = wish._replace(figures={**wish.figures, **known})
    for limit, since in zip(scale.limits, state.above, strict=True):
        value = known.get(limit.signal, 0.0)
        enough = math.ceil(max(reading.ready, 1) * value / limit.above)
        lasts_s = -1.0 if since is None else reading.at - since
        if enough <= wish.wanted or (lasts_s < limit.for_s and wish.wanted >= current):
            continue
        if lasts_s >= limit.for_s:
            why = f"{limit.signal} of {value:.3g} has been above {limit.above:g} for {lasts_s:.0f} s"
            wish = Wish(enough, Reason.SIGNAL, why, wish.figures)
        else:
            why = f"{wish.why}; {limit.signal} of {value:.3g} needs {min(enough, current)}"
            wish = wish._replace(wanted=min(enough, current), reason=Reason.SIGNAL, why=why)
    return wish


def _wanted(wish: Wish) -> int:
    return wish.wanted


def _idle(scale: Scale, state: AutoscalerState, wish: Wish, now: float, current: int) -> Wish:
    """Scale to zero, or stay there, after long enough without a request."""
    idle_s = now - (now if state.asked_at is None else state.asked_at)
    if idle_s >= scale.to_zero_after_s or current == 0:
        return Wish(0, Reason.IDLE, f"no request for {idle_s:.0f} s", {"idle_s": idle_s})
    return max(wish, wish._replace(wanted=1), key=_wanted)


def _bounded(wish: Wish, low: int, high: int) -> Wish:
    wanted = min(max(wish.wanted, low), high)
    if wanted == wish.wanted:
        return wish
    name = "min" if wanted > wish.wanted else "max"
    why = f"{wish.why}; {wish.wanted} would do, but `{name}` is {wanted} now"
    return wish._replace(wanted=wanted, reason=Reason.BOUND, why=why)


def _remembered(scale: Scale, state: AutoscalerState, wanted: int, now: float) -> AutoscalerState:
    """Add the recommendation to those of the windows; recommendations close in time are merged."""
    longest_s = max(scale.up.window_s, scale.down.window_s)
    wishes = state.wishes
    if wishes and now - wishes[-1].at < longest_s / WISHES_MAX:
        last = wishes[-1]
        lowest, highest = min(last.lowest, wanted), max(last.highest, wanted)
        if (lowest, highest) == (last.lowest, last.highest):
            return state
        return replace(state, wishes=(*wishes[:-1], WishRange(last.at, lowest, highest)))
    begin = 0
    while begin + 1 < len(wishes) and wishes[begin + 1].at <= now - longest_s:
        begin += 1  # keep one from before the window: the recommendation at its beginning
    return replace(state, wishes=(*wishes[begin:], WishRange(now, wanted, wanted)))


def _paced(scale: Scale, state: AutoscalerState, wish: Wish, now: float, current: int) -> Wish:
    """Allow a change only if it was recommended throughout its window, and at its rate."""
    wanted = _windowed(scale, state, wish.wanted, now, current)
    if now - state.since < max(scale.down.window_s, GAP_S):
        wanted = max(wanted, current)
    if scale.policy is Policy.FOREBAY and wanted < current:
        wanted = _calm(scale, state, wanted, now, current)
    wanted = _at_pace(scale.up if wanted > current else scale.down, state, wanted, now, current)
    if wanted != wish.wanted:
        why = f"{wish.why}; {wish.wanted} would do, but not yet"
        return wish._replace(wanted=wanted, reason=Reason.WAIT, why=why)
    return wish._replace(reason=Reason.STEADY) if wanted == current and wish.reason in USUAL else wish


def _windowed(scale: Scale, state: AutoscalerState, wanted: int, now: float, current: int) -> int:
    """The change on which all recommendations in the window agree: the lowest for scaling up, the highest for
    down."""
    window_s = scale.up.window_s if wanted > current else scale.down.window_s
    if window_s == 0:
        return wanted
    if state.wishes[0].at > now - window_s:
        return current
    seen = [each for each in state.wishes if each.at > now - window_s]
    first = len(state.wishes) - len(seen) - 1
    seen.append(state.wishes[first])
    if wanted > current:
        return max(min(each.lowest for each in seen), current)
    return min(max(each.highest for each in seen), current)


def _calm(scale: Scale, state: AutoscalerState, wanted: int, now: float, current: int) -> int:
    """Remove none before the last addition can have taken effect; a single one only if that does not alternate."""
    window_s, changes = scale.down.window_s, state.changes
    added_at = next((at for at, by in reversed(changes) if by > 0), 0.0)
    if now - added_at < state.learned.lead_s + window_s:
        return current
    lately = [by > 0 for at, by in changes if at > now - CALM * window_s]
    turns = sum(one != other for one, other in pairwise([*lately, False]))
    return current if wanted == current - 1 and turns > TURNS_MAX else wanted


def _at_pace(pace: Pace, state: AutoscalerState, wanted: int, now: float, current: int) -> int:
    if pace.replicas is None:
        return wanted
    up = wanted > current
    changed = sum(abs(by) for at, by in state.changes if at > now - pace.in_s and (by > 0) == up)
    room = max(pace.replicas - changed, 0)
    return min(wanted, current + room) if up else max(wanted, current - room)
