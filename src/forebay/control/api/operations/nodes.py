"""Operations on nodes: state of nodes and GPUs, drain and undrain."""

from collections.abc import Mapping
from typing import Final

from forebay.control.api import documents
from forebay.control.api.services import AdminCall, Handler
from forebay.control.health.documents import NodeStanding
from forebay.control.health.health import Health, NodeRefused
from forebay.core.errors import Code, Refusal
from forebay.wire import admin_request


def _health(call: AdminCall) -> Health:
    found = call.services.control.health
    if found is None:
        raise Refusal(Code.CONFLICT, "This cluster does not manage nodes.")
    return found


async def nodes(call: AdminCall) -> documents.NodeDocuments:
    """All nodes, observed just now."""
    control = call.services.control
    await control.look()
    known, placer = _health(call).nodes(), control.placer
    if placer is None:
        return documents.NodeDocuments(known)
    waits = {slot: why for slot, why in sorted(placer.placement.waits.items()) if slot in placer.needs}
    return documents.NodeDocuments(known, placer.rows(), waits)


async def drain(call: AdminCall) -> NodeStanding:
    """Drain a node."""
    name, wanted = call.named("node"), admin_request.drain(call.body)
    try:
        standing = await _health(call).drain(name, call.caller.name, wanted.why, force=wanted.force)
    except NodeRefused as error:
        raise _translated(error) from error
    await call.services.control.look()
    return standing


async def undrain(call: AdminCall) -> NodeStanding:
    """Put a node, or a device of it, back into service."""
    name, wanted = call.named("node"), admin_request.undrain(call.body)
    try:
        standing = await _health(call).undrain(name, call.caller.name, wanted.why, wanted.device)
    except NodeRefused as error:
        raise _translated(error) from error
    await call.services.control.look()
    return standing


def _translated(error: NodeRefused) -> Refusal:
    return Refusal(Code.NOT_FOUND if error.param else Code.CONFLICT, f"{error.text}.", error.param)


HANDLERS: Final[Mapping[str, Handler]] = {"nodes": nodes, "drain": drain, "undrain": undrain}
