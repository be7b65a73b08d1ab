"""Operations on the registry. They block, and run in threads of their own."""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from forebay.control.api.behind import Asked, Handler
from forebay.control.api.documents import Collected, LackingDocument, PartDocument, Revisions, Verified
from forebay.core.registry.approval import Step
from forebay.registry.bundles import read_bundle
from forebay.registry.catalogue import Listed, Registry
from forebay.registry.signing import Proof
from forebay.wire import admin_request
from forebay.wire.admin_request import BODY_BYTES_MAX

T = TypeVar("T")


async def _on(asked: Asked, work: Callable[[Registry], T]) -> T:
    def opened() -> T:
        with asked.behind.catalogue.registry() as registry:
            return work(registry)

    return await asked.behind.threads(opened)


async def revisions(asked: Asked) -> Revisions:
    """The revisions of all models."""
    return Revisions(tuple(await _on(asked, lambda registry: registry.revisions())))


async def revisions_of_model(asked: Asked) -> Revisions:
    """The revisions of one model; none if it is unknown."""
    model = asked.named("model")
    return Revisions(tuple(await _on(asked, lambda registry: registry.revisions(model))))


async def revision(asked: Asked) -> Listed:
    """All data of a revision."""
    model, name = asked.named("model"), asked.named("revision")
    return await _on(asked, lambda registry: registry.show(model, name))


async def add(asked: Asked) -> Listed:
    """Fetch and register a model."""
    model, catalogue = asked.named("model"), asked.behind.catalogue
    wanted = await asked.behind.threads(lambda: admin_request.add(asked.body))  # it may name very many files
    return await _on(asked, lambda registry: catalogue.add(registry, model, wanted, asked.actor))


async def lacking(asked: Asked) -> LackingDocument:
    """The files of an artifact that have to be uploaded."""
    manifest = await asked.behind.threads(lambda: admin_request.lacking(asked.body))
    return LackingDocument(await _on(asked, lambda registry: registry.lacking(manifest)), BODY_BYTES_MAX)


async def upload(asked: Asked) -> PartDocument:
    """Store a part of an uploaded file. There are many of these requests, so the database is not used."""
    part = admin_request.part(str(asked.request.path_params["sha256"]), asked.request.query_params)
    staging = asked.behind.catalogue.staging
    return PartDocument(await asked.behind.threads(lambda: staging().put(*part, asked.body)))


async def set_alias(asked: Asked) -> Listed:
    """Set an alias to a revision."""
    model, alias, name = asked.named("model"), asked.named("alias"), admin_request.alias(asked.body)
    return await _on(asked, lambda registry: registry.set_alias(model, alias, name, asked.actor))


async def sign(asked: Asked) -> Listed:
    """Add a signature of the artifact; the key in it counts, not who uploads it."""
    model, name, wanted = asked.named("model"), asked.named("revision"), admin_request.sign(asked.body)
    if wanted.bundle is None:
        proof = Proof(wanted.public, wanted.signature)
        return await _on(asked, lambda registry: registry.sign(model, name, proof, asked.actor))
    bundle = read_bundle(msgspec.json.encode(wanted.bundle), "`bundle`")
    return await _on(asked, lambda registry: registry.attach(model, name, bundle, asked.actor))


async def verify(asked: Asked) -> Verified:
    """Verify every byte."""
    model, progress = admin_request.verify(asked.body), asked.behind.catalogue.progress
    wrong = await _on(asked, lambda registry: registry.verify(progress, model))
    return Verified(not wrong, tuple(wrong))


async def collect(asked: Asked) -> Collected:
    """Remove files that no revision refers to."""
    admin_request.nothing(asked.body)
    return Collected(await _on(asked, lambda registry: registry.sweep()))


def _taking(step: Step) -> Handler:
    async def handler(asked: Asked) -> Listed:
        model, name, why = asked.named("model"), asked.named("revision"), admin_request.why(asked.body)
        return await _on(asked, lambda registry: registry.step(model, name, step, asked.actor, why))

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
