"""Operations on the scaling of models."""

from collections.abc import Mapping
from typing import Final

from forebay.control.api import documents
from forebay.control.api.behind import Asked, Handler
from forebay.control.scaling.nouns import ScaleRefused, Wish
from forebay.control.scaling.scaler import Scaler
from forebay.core.errors import Code, Refusal
from forebay.wire import admin_request


def _scaler(asked: Asked) -> Scaler:
    found = asked.behind.control.scaler
    if found is None:
        raise Refusal(Code.CONFLICT, "This cluster does not support scaling.")
    return found


async def scaling(asked: Asked) -> documents.Scalings:
    """All models, each with its last decision."""
    scaler = _scaler(asked)
    return documents.Scalings(tuple(documents.scaling(each) for each in scaler.standing()), scaler.limits)


async def scaling_of(asked: Asked) -> documents.ScalingDocument:
    """A model, with its recent decisions."""
    name = asked.named("model")
    for each in _scaler(asked).standing(name):
        return documents.scaling(each, all_of_it=True)
    there = ", ".join(each.model for each in _scaler(asked).standing())
    raise Refusal(Code.NOT_FOUND, f"There is no model {name!r}; there is: {there}.", "model")


async def set_scaling(asked: Asked) -> documents.ScalingDocument:
    """Set the replica count or bounds of a model."""
    name, wanted = asked.named("model"), admin_request.scale(asked.body)
    wish = Wish(name, wanted.replicas, wanted.min, wanted.max, wanted.why)
    try:
        standing = await _scaler(asked).set(wish, asked.caller.name)
    except ScaleRefused as error:
        code = Code.NOT_FOUND if error.param == "model" else Code.CONFLICT
        raise Refusal(code, f"{error.text}.", error.param) from error
    await asked.behind.control.look()
    return documents.scaling(next(iter(_scaler(asked).standing(name)), standing))


HANDLERS: Final[Mapping[str, Handler]] = {
    "scaling": scaling,
    "scalingOfModel": scaling_of,
    "setScaling": set_scaling,
}
