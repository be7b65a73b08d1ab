"""Validates a requested rollout before it starts."""

from forebay.control.plan import PlannedModel
from forebay.control.quality.golden import golden_per_s, golden_problems
from forebay.control.rolling.nouns import DeployRefused, Run, Shelf, Wish
from forebay.control.rolling.shaping import deployed
from forebay.core.deploy.counting import Counted
from forebay.core.deploy.course import problems
from forebay.core.deploy.evidence import Pace, rules_of, undecided
from forebay.core.deploy.rollout import Rollout, Seen, wanted
from forebay.core.deploy.slots import with_canary
from forebay.core.rollout import begin
from forebay.store.rollouts import Row, Target


async def asked(
    wish: Wish, model: PlannedModel, target: Target | None, last: Row | None, *, shelf: Shelf, run: Run
) -> Row:
    """The requested rollout, without an id yet. Raises `DeployRefused`, `StoreError`.

    The caller fills in `created_at` and `created_by`.
    """
    if last is not None and not last.ended:
        raise DeployRefused(f"rollout {last.rollout.id} of {wish.model} is under way; abort it first")
    wrong = "; ".join(problems(wish.course))
    if wrong:
        raise DeployRefused(wrong, "course")
    served = deployed(model, target, last)
    revision = wish.revision
    if revision != model.routes.revision:
        revision = await run(lambda: shelf.find(wish.model, wish.revision))
    if revision == served.stable:
        raise DeployRefused(f"{wish.model} serves {revision} already", "revision")
    wrong = "; ".join(await run(lambda: golden_problems(model.rollout)))
    if wrong:
        raise DeployRefused(wrong, "course")
    rules = rules_of(model.routes.task, model.rollout, wish.course.kind)
    rollout = Rollout("", wish.model, served.stable, revision, wish.course, 0.0)
    asks = wanted(rollout, Seen(len(model.slots), None, None))
    return Row(rollout, rules, Counted(begin(rules)), with_canary(served.held, asks.canary), 0.0, "")


async def check_plan(row: Row, model: PlannedModel, requests_per_s: float, last: Row | None, run: Run) -> None:
    """Raises `DeployRefused` with the calculation if the plan most likely cannot reach a verdict in its time."""
    golden = await run(lambda: golden_per_s(model.rollout))
    known = last.counted.state if last is not None else None
    why_not = undecided(row.rules, row.rollout.course, Pace(requests_per_s, golden), known)
    if why_not is not None:
        raise DeployRefused(f"the plan cannot reach a verdict in its time, {why_not}", "course")
