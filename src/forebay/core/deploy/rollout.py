"""The state machine of a rollout, as a pure function of observations.

The old revision keeps all its replicas until the new one has served all traffic for a while, so rolling back only
moves traffic and needs no start. The new one never gets a larger share than its ready replicas can serve, and none
while it has no ready replica. Unknown observations change nothing.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from forebay.core.deploy.course import Course, Kind, replicas_for
from forebay.core.rollout.guards import Tripped
from forebay.core.rollout.values import Decision, Verdict


class Phase(StrEnum):
    """The phase of a rollout."""

    STARTING = "starting"
    """Replicas of the new revision are starting; it has no traffic."""
    COMPARING = "comparing"
    """Both serve, or the new one is shadowed, and they are compared."""
    SETTLING = "settling"
    """The new revision has all traffic; the old one is kept warm."""
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    JUDGED = "judged"
    """Ended with a report, as planned; the old revision serves."""


KNOWN_S: Final = 2.0
"""After this time every gateway has the new routing; until then the old replicas stay, whatever was commanded."""
ENDED: Final = frozenset({Phase.PROMOTED, Phase.ROLLED_BACK, Phase.JUDGED})


class Command(StrEnum):
    """Commands of an operator."""

    PAUSE = "pause"
    """Keep the share; guards and verdicts of harm still end the rollout."""
    RESUME = "resume"
    PROMOTE = "promote"
    """Go to the next step without a verdict, as soon as it has the replicas."""
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout of a model. Times are seconds since the epoch, as it outlives processes."""

    id: str
    model: str
    stable: str
    """The revision that serves so far."""
    canary: str
    """The revision being rolled out."""
    course: Course
    since: float
    """When the phase, or its current step, began."""
    phase: Phase = Phase.STARTING
    step: int = 0
    share: float = 0.0
    """The canary's current share."""
    paused: bool = False
    forced: bool = False
    """An operator requested the next step without a verdict."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class ModelObservation:
    """What is known of the model now; None: unknown."""

    wanted: int
    """Desired replicas of the model."""
    stable_ready: int | None
    canary_ready: int | None
    verdict: Verdict | None = None
    tripped: Tripped | None = None
    whole_s: float = math.inf
    """For how long gateways have been told the whole share that was decided, and not less for lack of replicas."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rollout requires of the cluster. `share`: of the traffic; `mirrored`: of the requests that are
    copied."""

    stable: int
    canary: int
    share: float = 0.0
    mirrored: float = 0.0


def decide(rollout: Rollout, seen: ModelObservation, command: Command | None, now: float) -> tuple[Rollout, Wanted]:
    """One step of the state machine. Idempotent for the same input."""
    if rollout.since > now:  # the clock was set back: restart the step rather than let it last for hours
        rollout = replace(rollout, since=now)
    rollout = _apply_command(rollout, command, now)
    rollout = _advance(rollout, seen, now)
    return rollout, wanted(rollout, seen)


def wanted(rollout: Rollout, seen: ModelObservation) -> Wanted:
    """What a rollout in its current state requires of the cluster."""
    all_of_it = max(seen.wanted, 1)
    match rollout.phase:
        case Phase.PROMOTED:
            return Wanted(0, all_of_it, 1.0)
        case Phase.ROLLED_BACK | Phase.JUDGED:
            return Wanted(all_of_it, 0)
        case Phase.SETTLING:
            return Wanted(all_of_it, all_of_it, rollout.share)
        case _:
            canary = _replicas(rollout, all_of_it)
            if rollout.course.kind is Kind.SHADOW:
                return Wanted(all_of_it, canary, mirrored=rollout.share)
            return Wanted(all_of_it, canary, rollout.share)


def _replicas(rollout: Rollout, all_of_it: int) -> int:
    steps = rollout.course.steps
    return replicas_for(steps[rollout.step].share if steps else 1.0, all_of_it)


def _apply_command(rollout: Rollout, command: Command | None, now: float) -> Rollout:
    if rollout.phase in ENDED:
        return rollout
    match command:
        case Command.ABORT:
            return roll_back(rollout, "aborted by an operator", now)
        case Command.PAUSE:
            return replace(rollout, paused=True, why="paused by an operator")
        case Command.RESUME:
            return replace(rollout, paused=False, why="resumed")
        case Command.PROMOTE:
            return replace(rollout, paused=False, forced=True, why="an operator requested the next step")
        case None:
            return rollout


def _advance(rollout: Rollout, seen: ModelObservation, now: float) -> Rollout:
    if rollout.phase in ENDED:
        return rollout
    if seen.tripped is not None:
        return roll_back(rollout, seen.tripped.reason, now)
    if seen.verdict is not None and seen.verdict.decision is Decision.ROLLBACK and rollout.course.takes_over:
        return roll_back(rollout, seen.verdict.reason, now)
    match rollout.phase:
        case Phase.STARTING:
            return _start(rollout, seen, now)
        case Phase.COMPARING:
            return _compare(_carried(rollout, seen), seen, now)
        case _:
            return _settle(rollout, seen, now)


def _start(rollout: Rollout, seen: ModelObservation, now: float) -> Rollout:
    """Wait for replicas; then begin the first step or move the traffic."""
    if seen.canary_ready is None:
        return rollout
    needed = _replicas(rollout, max(seen.wanted, 1))
    if seen.canary_ready < needed:
        late_s = now - rollout.since
        if late_s >= rollout.course.start_timeout_s:
            why = f"{seen.canary_ready} of {needed} replicas of {rollout.canary} were ready after {late_s:.0f} s"
            return roll_back(rollout, why, now)
        return replace(rollout, why=f"{seen.canary_ready} of {needed} replicas of {rollout.canary} are ready")
    if rollout.paused:
        return rollout
    if not rollout.course.steps:
        return _take_over(rollout, now)
    share = rollout.course.steps[0].share
    why = f"{rollout.canary} gets {share:.0%}"
    return replace(rollout, phase=Phase.COMPARING, since=now, share=share, forced=False, why=why)


def _compare(rollout: Rollout, seen: ModelObservation, now: float) -> Rollout:
    """Go to the next step when its time is over; after the last one only with a verdict."""
    step = rollout.course.steps[rollout.step]
    spent_s = now - rollout.since
    last = rollout.step + 1 == len(rollout.course.steps)
    fine = seen.verdict is not None and seen.verdict.decision is Decision.PROMOTE
    if rollout.paused and not rollout.forced:
        return rollout
    if not rollout.course.takes_over:
        if spent_s < step.time_s and not rollout.forced:
            return rollout
        return replace(rollout, phase=Phase.JUDGED, since=now, share=0.0, why="its time is over")
    if rollout.forced or (fine and spent_s > rollout.course.warm_up_s) or (spent_s >= step.time_s and not last):
        return _carried(_next(rollout, now), seen)
    if spent_s >= step.time_s:
        reason = seen.verdict.reason if seen.verdict else "nothing was observed"
        if not rollout.course.hold:
            return roll_back(rollout, f"no verdict in {spent_s:.0f} s: {reason}", now)
        return replace(rollout, why=f"no verdict in time, waiting for an operator: {reason}")
    return rollout


def _next(rollout: Rollout, now: float) -> Rollout:
    """The next step, or the takeover, limited by ready replicas."""
    steps, following = rollout.course.steps, rollout.step + 1
    if following == len(steps):
        return _take_over(rollout, now)
    why = f"{rollout.canary} gets {steps[following].share:.0%} as soon as it has the replicas"
    return replace(rollout, step=following, since=now, forced=False, why=why)


def _take_over(rollout: Rollout, now: float) -> Rollout:
    why = f"{rollout.canary} takes over as soon as it has the replicas"
    return replace(rollout, phase=Phase.SETTLING, since=now, forced=False, why=why)


def _carried(rollout: Rollout, seen: ModelObservation) -> Rollout:
    """The step's share, limited by what ready replicas can serve. Unknown: unchanged."""
    if seen.canary_ready is None:
        return rollout
    steps = rollout.course.steps
    aim = 1.0 if rollout.phase is Phase.SETTLING else steps[rollout.step].share
    all_of_it = max(seen.wanted, 1)
    if seen.canary_ready >= replicas_for(aim, all_of_it):
        return replace(rollout, share=aim)
    return replace(rollout, share=min(rollout.share, seen.canary_ready / all_of_it))


def _settle(rollout: Rollout, seen: ModelObservation, now: float) -> Rollout:
    """Keep the old revision for a while; the time counts from when the new one has all traffic."""
    before, rollout = rollout.share, _carried(rollout, seen)
    if rollout.share < 1.0:
        return rollout
    if before < 1.0:
        why = f"{rollout.canary} has all of the traffic; {rollout.stable} stays warm for a while"
        return replace(rollout, since=now, why=why)
    if min(now - rollout.since, seen.whole_s) < KNOWN_S:
        return rollout
    if not rollout.forced and (now - rollout.since < rollout.course.settle_s or rollout.paused):
        return rollout
    if seen.canary_ready is None or seen.canary_ready < max(seen.wanted, 1):
        return rollout
    return replace(rollout, phase=Phase.PROMOTED, since=now, why=f"{rollout.canary} serves everything")


def roll_back(rollout: Rollout, why: str, now: float) -> Rollout:
    """Roll back: the old revision serves everything again, at once."""
    return replace(rollout, phase=Phase.ROLLED_BACK, since=now, share=0.0, paused=False, forced=False, why=why)
