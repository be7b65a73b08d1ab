"""The events of rollout changes, their reasons, and the target that results from a rollout."""

from collections.abc import Iterator

from forebay.control.plan import PlannedModel
from forebay.control.rolling.shaping import base_held
from forebay.core.deploy.rollout import Command, Phase
from forebay.store.rollouts import RolloutEvent, Row, Target

CONTROL = "control"
"""The actor of changes that nobody requested."""
FILE = "the cluster file"
UNKNOWN_PACE = "the request rate is not known yet, so it was not checked whether the plan can reach a verdict"
ENDS = {Phase.PROMOTED: "promoted", Phase.ROLLED_BACK: "rolled_back", Phase.JUDGED: "judged"}
COMMANDS = {Command.PAUSE: "paused", Command.RESUME: "resumed", Command.PROMOTE: "forced", Command.ABORT: "aborted"}
DONE = {
    Command.PAUSE: "paused",
    Command.RESUME: "resumed",
    Command.PROMOTE: "taken a step further",
    Command.ABORT: "aborted",
}


def start_event(row: Row, why: str) -> RolloutEvent:
    """The event of a rollout's start."""
    return RolloutEvent("rollout.started", row.created_at, row.created_by, why)


def control_events(before: Row, after: Row, now: float) -> tuple[RolloutEvent, ...]:
    """The events of control's own changes; none if only evidence has arrived."""
    return tuple(RolloutEvent(f"rollout.{kind}", now, CONTROL, after.rollout.why) for kind in _kinds(before, after))


def command_events(command: Command, actor: str, why: str, now: float) -> tuple[RolloutEvent, ...]:
    """The event of an operator's command."""
    return (RolloutEvent(f"rollout.{COMMANDS[command]}", now, actor, why),)


def _kinds(before: Row, after: Row) -> Iterator[str]:
    old, new = before.rollout, after.rollout
    if after.ended and not before.ended:
        yield ENDS[new.phase]
    elif (old.phase, old.step, old.share) != (new.phase, new.step, new.share):
        yield "step"
    elif before.held != after.held:
        yield "slots"


def target_after(row: Row, model: PlannedModel, target: Target | None, now: float) -> Target | None:
    """What a model serves after a rollout; None: what it would serve anyway."""
    rollout, declared = row.rollout, model.routes.revision
    if not row.ended:
        return None
    if rollout.phase is Phase.PROMOTED:
        held, by = row.held.canary, row.created_by
        return Target(rollout.model, rollout.canary, declared, held, now, by, f"rollout {rollout.id}")
    if row.held.stable == base_held(model, target):
        return None
    why = f"other slots than before rollout {rollout.id}"
    return Target(rollout.model, rollout.stable, declared, row.held.stable, now, CONTROL, why)
