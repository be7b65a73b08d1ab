"""Operations on nodes: state of nodes and GPUs, drain and undrain."""

from collections.abc import Mapping
from typing import Final

from forebay.control.api import documents
from forebay.control.api.behind import Asked, Handler
from forebay.control.health.health import Health, NodeRefused
from forebay.control.health.telling import Standing
from forebay.core.errors import Code, Refusal
from forebay.wire import admin_request


def _health(asked: Asked) -> Health:
    found = asked.behind.control.health
    if found is None:
        raise Refusal(Code.CONFLICT, "This cluster does not manage nodes.")
    return found


async def nodes(asked: Asked) -> documents.NodeDocuments:
    """All nodes, observed just now."""
    control = asked.behind.control
    await control.look()
    known, placer = _health(asked).nodes(), control.placer
    if placer is None:
        return documents.NodeDocuments(known)
    waits = {slot: why for slot, why in sorted(placer.placement.waits.items()) if slot in placer.needs}
    return documents.NodeDocuments(known, placer.rows(), waits)


async def drain(asked: Asked) -> Standing:
    """Drain a node."""
    name, wanted = asked.named("node"), admin_request.drain(asked.body)
    try:
        standing = await _health(asked).drain(name, asked.caller.name, wanted.why, force=wanted.force)
    except NodeRefused as error:
        raise _translated(error) from error
    await asked.behind.control.look()
    return standing


async def undrain(asked: Asked) -> Standing:
    """Put a node, or a device of it, back into service."""
    name, wanted = asked.named("node"), admin_request.undrain(asked.body)
    try:
        standing = await _health(asked).undrain(name, asked.caller.name, wanted.why, wanted.device)
    except NodeRefused as error:
        raise _translated(error) from error
    await asked.behind.control.look()
    return standing


def _translated(error: NodeRefused) -> Refusal:
    return Refusal(Code.NOT_FOUND if error.param else Code.CONFLICT, f"{error.text}.", error.param)


HANDLERS: Final[Mapping[str, Handler]] = {"nodes": nodes, "drain": drain, "undrain": undrain}
