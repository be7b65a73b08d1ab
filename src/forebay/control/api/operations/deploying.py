"""Operations on rollouts."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from forebay.control.api import documents
from forebay.control.api.services import AdminCall, Handler
from forebay.control.rolling.values import RolloutRequest, RolloutStanding
from forebay.core.cluster import ModelSettings
from forebay.core.deploy.course import Course, Kind
from forebay.core.deploy.rollout import ENDED, Command
from forebay.core.errors import Code, Refusal
from forebay.obs.clock import wall_s
from forebay.wire import admin_request
from forebay.wire.clusterfile import ClusterFileError, load_course


async def deploy(call: AdminCall) -> documents.RolloutDocument:
    """Start a rollout."""
    name = call.named("model")
    wanted = admin_request.deploy(call.body)
    course = _course(_model(call, name), wanted.plan)
    request = RolloutRequest(name, wanted.revision, course, wanted.why, wanted.unchecked)
    return documents.rollout(await call.deployments.deploy(request, call.caller.name), wall_s())


def _model(call: AdminCall, name: str) -> ModelSettings:
    models = {model.name: model for model in call.services.changing.cluster.models}
    if name not in models:
        raise Refusal(Code.NOT_FOUND, f"There is no model {name!r}; there is: {', '.join(models)}.", "model")
    return models[name]


def _course(model: ModelSettings, plan: str | dict[str, Any] | None) -> Course:
    """The course requested: the model's own, that of a kind, or one described in the request."""
    if plan is None or plan in tuple(Kind):
        return model.rollout.course(None if plan is None else Kind(str(plan)))
    if isinstance(plan, str) and ":" not in plan:
        kinds = ", ".join(Kind)
        raise Refusal(Code.INVALID_REQUEST, f"plan: there is no {plan!r}; there is: {kinds}, or a plan.", "plan")
    text = plan if isinstance(plan, str) else msgspec.json.encode(plan).decode()
    try:
        return load_course(text, "plan")
    except ClusterFileError as error:
        raise Refusal(Code.INVALID_REQUEST, str(error), "plan") from error


async def rollouts(call: AdminCall) -> documents.Rollouts:
    """Active rollouts and the last one of each model; or only those that have ended, or have not."""
    query = call.request.query_params
    model, ended, last = (
        admin_request.name(query, "model"),
        admin_request.flag(query, "ended"),
        admin_request.last(query),
    )
    known = call.deployments.standing(model)
    if ended:  # only the store has all of them, active ones first
        past = await call.deployments.past(model, last + len(known))
        found = [each for each in past if each.rollout.phase in ENDED][:last][::-1]
    else:
        found = [each for each in known if ended is None or each.rollout.phase not in ENDED][-last:]
    if model is not None and not found:
        _model(call, model)
    return documents.rollouts(found, wall_s())


async def rollout(call: AdminCall) -> documents.RolloutDocument:
    """One rollout, however old. The store is read only for those that are not in memory."""
    id, deployments = call.named("id"), call.deployments
    found = _of(id, deployments.standing()) or _of(id, await deployments.past(None, admin_request.EVENTS_MAX))
    if found is None:
        raise Refusal(Code.NOT_FOUND, f"There is no rollout {id!r}.", "id")
    return documents.rollout(found, wall_s())


def _of(id: str, standings: Iterable[RolloutStanding]) -> RolloutStanding | None:
    return next((each for each in standings if each.rollout.id == id), None)


def _commanding(command: Command) -> Handler:
    async def handler(call: AdminCall) -> documents.RolloutDocument:
        why = admin_request.why(call.body)
        standing = await call.deployments.command(call.named("id"), command, call.caller.name, why)
        return documents.rollout(standing, wall_s())

    return handler


HANDLERS: Final[Mapping[str, Handler]] = {
    "deploy": deploy,
    "rollouts": rollouts,
    "rollout": rollout,
    **{command.value: _commanding(command) for command in Command},
}
