"""Operations on the scaling of models."""

from collections.abc import Mapping
from typing import Final

from forebay.control.api import documents
from forebay.control.api.services import AdminCall, Handler
from forebay.control.scaling.scaler import Scaler
from forebay.control.scaling.values import ScaleRefused, ScalingRequest
from forebay.core.errors import Code, Refusal
from forebay.wire import admin_request


def _scaler(call: AdminCall) -> Scaler:
    found = call.services.control.scaler
    if found is None:
        raise Refusal(Code.CONFLICT, "This cluster does not support scaling.")
    return found


async def scaling(call: AdminCall) -> documents.Scalings:
    """All models, each with its last decision."""
    scaler = _scaler(call)
    return documents.Scalings(tuple(documents.scaling(each) for each in scaler.standing()), scaler.limits)


async def scaling_of(call: AdminCall) -> documents.ScalingDocument:
    """A model, with its recent decisions."""
    name = call.named("model")
    for each in _scaler(call).standing(name):
        return documents.scaling(each, all_of_it=True)
    there = ", ".join(each.model for each in _scaler(call).standing())
    raise Refusal(Code.NOT_FOUND, f"There is no model {name!r}; there is: {there}.", "model")


async def set_scaling(call: AdminCall) -> documents.ScalingDocument:
    """Set the replica count or bounds of a model."""
    name, wanted = call.named("model"), admin_request.scale(call.body)
    request = ScalingRequest(name, wanted.replicas, wanted.min, wanted.max, wanted.why)
    try:
        standing = await _scaler(call).set(request, call.caller.name)
    except ScaleRefused as error:
        code = Code.NOT_FOUND if error.param == "model" else Code.CONFLICT
        raise Refusal(code, f"{error.text}.", error.param) from error
    await call.services.control.look()
    return documents.scaling(next(iter(_scaler(call).standing(name)), standing))


HANDLERS: Final[Mapping[str, Handler]] = {
    "scaling": scaling,
    "scalingOfModel": scaling_of,
    "setScaling": set_scaling,
}
