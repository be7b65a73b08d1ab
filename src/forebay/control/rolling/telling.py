"""What a change of a rollout is called in the history, why it happened, and what a model serves at its end."""

from collections.abc import Iterator

from forebay.control.plan import PlannedModel
from forebay.control.rolling.shaping import base_held
from forebay.core.deploy.rollout import Command, Phase
from forebay.store.rollouts import Happening, Row, Target

CONTROL = "control"
"""Who does what nobody has asked for."""
FILE = "the cluster file"
UNKNOWN_PACE = "how many requests there are is not known yet, so nobody has checked whether the plan can decide"
ENDS = {Phase.PROMOTED: "promoted", Phase.ROLLED_BACK: "rolled_back", Phase.JUDGED: "judged"}
COMMANDS = {Command.PAUSE: "paused", Command.RESUME: "resumed", Command.PROMOTE: "forced", Command.ABORT: "aborted"}
DONE = {
    Command.PAUSE: "paused",
    Command.RESUME: "resumed",
    Command.PROMOTE: "taken a step further",
    Command.ABORT: "aborted",
}


def started(row: Row, why: str) -> Happening:
    """Somebody has begun a rollout."""
    return Happening("rollout.started", row.created_at, row.created_by, why)


def happenings(before: Row, after: Row, now: float) -> tuple[Happening, ...]:
    """What control itself has done; nothing if only evidence has come in."""
    return tuple(Happening(f"rollout.{kind}", now, CONTROL, after.rollout.why) for kind in _kinds(before, after))


def said(command: Command, actor: str, why: str, now: float) -> tuple[Happening, ...]:
    """What somebody has asked for."""
    return (Happening(f"rollout.{COMMANDS[command]}", now, actor, why),)


def _kinds(before: Row, after: Row) -> Iterator[str]:
    old, new = before.rollout, after.rollout
    if after.ended and not before.ended:
        yield ENDS[new.phase]
    elif (old.phase, old.step, old.share) != (new.phase, new.step, new.share):
        yield "step"
    elif before.held != after.held:
        yield "slots"


def target_after(row: Row, model: PlannedModel, target: Target | None, now: float) -> Target | None:
    """What a model is to serve from the end of a rollout on; None: what it would serve anyway."""
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
