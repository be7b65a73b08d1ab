"""Operations on the registry. They block, and run in threads of their own."""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from forebay.control.api.documents import Collected, LackingDocument, PartDocument, Revisions, Verified
from forebay.control.api.services import AdminCall, Handler
from forebay.core.registry.approval import Step
from forebay.registry.bundles import read_bundle
from forebay.registry.catalogue import Listed, Registry
from forebay.registry.signing import Proof
from forebay.wire import admin_request
from forebay.wire.admin_request import BODY_BYTES_MAX

T = TypeVar("T")


async def _on(call: AdminCall, work: Callable[[Registry], T]) -> T:
    def opened() -> T:
        with call.services.catalogue.registry() as registry:
            return work(registry)

    return await call.services.threads(opened)


async def revisions(call: AdminCall) -> Revisions:
    """The revisions of all models."""
    return Revisions(tuple(await _on(call, lambda registry: registry.revisions())))


async def revisions_of_model(call: AdminCall) -> Revisions:
    """The revisions of one model; none if it is unknown."""
    model = call.named("model")
    return Revisions(tuple(await _on(call, lambda registry: registry.revisions(model))))


async def revision(call: AdminCall) -> Listed:
    """All data of a revision."""
    model, name = call.named("model"), call.named("revision")
    return await _on(call, lambda registry: registry.show(model, name))


async def add(call: AdminCall) -> Listed:
    """Fetch and register a model."""
    model, catalogue = call.named("model"), call.services.catalogue
    wanted = await call.services.threads(lambda: admin_request.add(call.body))  # it may name very many files
    return await _on(call, lambda registry: catalogue.add(registry, model, wanted, call.actor))


async def lacking(call: AdminCall) -> LackingDocument:
    """The files of an artifact that have to be uploaded."""
    manifest = await call.services.threads(lambda: admin_request.lacking(call.body))
    return LackingDocument(await _on(call, lambda registry: registry.lacking(manifest)), BODY_BYTES_MAX)


async def upload(call: AdminCall) -> PartDocument:
    """Store a part of an uploaded file. There are many of these requests, so the database is not used."""
    part = admin_request.part(str(call.request.path_params["sha256"]), call.request.query_params)
    staging = call.services.catalogue.staging
    return PartDocument(await call.services.threads(lambda: staging().put(*part, call.body)))


async def set_alias(call: AdminCall) -> Listed:
    """Set an alias to a revision."""
    model, alias, name = call.named("model"), call.named("alias"), admin_request.alias(call.body)
    return await _on(call, lambda registry: registry.set_alias(model, alias, name, call.actor))


async def sign(call: AdminCall) -> Listed:
    """Add a signature of the artifact; the key in it counts, not who uploads it."""
    model, name, wanted = call.named("model"), call.named("revision"), admin_request.sign(call.body)
    if wanted.bundle is None:
        proof = Proof(wanted.public, wanted.signature)
        return await _on(call, lambda registry: registry.sign(model, name, proof, call.actor))
    bundle = read_bundle(msgspec.json.encode(wanted.bundle), "`bundle`")
    return await _on(call, lambda registry: registry.attach(model, name, bundle, call.actor))


async def verify(call: AdminCall) -> Verified:
    """Verify every byte."""
    model, progress = admin_request.verify(call.body), call.services.catalogue.progress
    wrong = await _on(call, lambda registry: registry.verify(progress, model))
    return Verified(not wrong, tuple(wrong))


async def collect(call: AdminCall) -> Collected:
    """Remove files that no revision refers to."""
    admin_request.nothing(call.body)
    return Collected(await _on(call, lambda registry: registry.sweep()))


def _taking(step: Step) -> Handler:
    async def handler(call: AdminCall) -> Listed:
        model, name, why = call.named("model"), call.named("revision"), admin_request.why(call.body)
        return await _on(call, lambda registry: registry.step(model, name, step, call.actor, why))

    return handler


HANDLERS: Final[Mapping[str, Handler]] = {
    "revisions": revisions,
    "revisionsOfModel": revisions_of_model,
    "revision": revision,
    "addRevision": add,
    "lacking": lacking,
    "upload": upload,
    "setAlias": set_alias,
    "sign": sign,
    "verify": verify,
    "collect": collect,
    **{step.value: _taking(step) for step in (Step.APPROVE, Step.REJECT, Step.RESUBMIT)},
}
