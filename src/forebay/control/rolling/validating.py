"""Validates a requested rollout before it starts."""

from forebay.control.plan import PlannedModel
from forebay.control.quality.golden import golden_per_s, golden_problems
from forebay.control.rolling.shaping import deployed
from forebay.control.rolling.values import DeployRefused, RevisionSource, RolloutRequest
from forebay.core.deploy.counting import Counted
from forebay.core.deploy.course import problems
from forebay.core.deploy.evidence import Pace, rules_of, undecided
from forebay.core.deploy.rollout import ModelObservation, Rollout, wanted
from forebay.core.deploy.slots import with_canary
from forebay.core.rollout import begin
from forebay.store.access import RunBlocking
from forebay.store.rollouts import Row, Target


async def new_rollout(
    request: RolloutRequest,
    model: PlannedModel,
    target: Target | None,
    last: Row | None,
    *,
    source: RevisionSource,
    run: RunBlocking,
) -> Row:
    """The requested rollout, without an id yet. Raises `DeployRefused`, `StoreError`.

    The caller fills in `created_at` and `created_by`.
    """
    if last is not None and not last.ended:
        raise DeployRefused(f"rollout {last.rollout.id} of {request.model} is under way; abort it first")
    wrong = "; ".join(problems(request.course))
    if wrong:
        raise DeployRefused(wrong, "plan")
    served = deployed(model, target, last)
    revision = request.revision
    if revision != model.routes.revision:
        revision = await run(lambda: source.find(request.model, request.revision))
    if revision == served.stable:
        raise DeployRefused(f"{request.model} serves {revision} already", "revision")
    wrong = "; ".join(await run(lambda: golden_problems(model.rollout)))
    if wrong:
        raise DeployRefused(wrong)
    rules = rules_of(model.routes.task, model.rollout, request.course.kind)
    rollout = Rollout("", request.model, served.stable, revision, request.course, 0.0)
    asks = wanted(rollout, ModelObservation(len(model.slots), None, None))
    return Row(rollout, rules, Counted(begin(rules)), with_canary(served.held, asks.canary), 0.0, "")


async def check_plan(
    row: Row, model: PlannedModel, requests_per_s: float, last: Row | None, run: RunBlocking
) -> None:
    """Raises `DeployRefused` with the calculation if the plan most likely cannot reach a verdict in its time."""
    golden = await run(lambda: golden_per_s(model.rollout))
    known = last.counted.state if last is not None else None
    why_not = undecided(row.rules, row.rollout.course, Pace(requests_per_s, golden), known)
    if why_not is not None:
        raise DeployRefused(f"the plan cannot reach a verdict in its time, {why_not}", "plan")
