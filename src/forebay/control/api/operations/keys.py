"""Operations on API keys. A change is recorded in the history first: while the store is down, no key changes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

from forebay.control.api import documents
from forebay.control.api.services import AdminCall, Handler
from forebay.control.keyring import KeyRefused, KeyRing
from forebay.core.errors import Code, Refusal
from forebay.core.tenancy import KeyRecord
from forebay.obs.clock import wall_s
from forebay.registry.keys import KeyFileError
from forebay.store import events
from forebay.store.database import Store
from forebay.wire import admin_request

T = TypeVar("T")


async def keys(call: AdminCall) -> documents.KeyDocuments:
    """All keys, without their secrets."""
    ring, now = _ring(call), wall_s()
    found = await _run(call, ring.all)
    return documents.KeyDocuments(tuple(documents.key(record, now) for record in found))


async def create(call: AdminCall) -> documents.NewKeyDocument:
    """Create a key."""
    ring, now, wanted = _ring(call), wall_s(), admin_request.create_key(call.body)
    expires = None if wanted.expires_s is None else now + wanted.expires_s

    def work(store: Store) -> documents.NewKeyDocument:
        note = partial(_note, store, call, "key.created", wanted.why)
        made = ring.create(wanted.tenant or wanted.name, wanted.role, now, expires, note)
        return documents.NewKeyDocument(made.key, documents.key(made.record, now))

    return await _with_store(call, work)


async def revoke(call: AdminCall) -> documents.KeyDocument:
    """Revoke a key."""
    ring, now, id, why = _ring(call), wall_s(), call.named("key"), admin_request.why(call.body)

    def work(store: Store) -> documents.KeyDocument:
        return documents.key(ring.revoke(id, now, partial(_note, store, call, "key.revoked", why)), now)

    return await _with_store(call, work)


async def rotate(call: AdminCall) -> documents.NewKeyDocument:
    """Replace a key."""
    ring, now, id, wanted = _ring(call), wall_s(), call.named("key"), admin_request.rotate_key(call.body)

    def work(store: Store) -> documents.NewKeyDocument:
        note = partial(_note, store, call, "key.rotated", wanted.why, replaces=id)
        made = ring.rotate(id, now, wanted.overlap_s, note)
        return documents.NewKeyDocument(made.key, documents.key(made.record, now))

    return await _with_store(call, work)


def _ring(call: AdminCall) -> KeyRing:
    ring = call.services.keys
    if ring is None:
        raise Refusal(Code.CONFLICT, "This cluster has no keys.")
    return ring()


async def _run(call: AdminCall, work: Callable[[], T]) -> T:
    try:
        return await call.services.threads(work)
    except KeyRefused as error:
        raise Refusal(Code.NOT_FOUND if error.param else Code.CONFLICT, error.text, error.param or None) from error
    except KeyFileError as error:
        raise Refusal(Code.INTERNAL, f"{error}.") from error


async def _with_store(call: AdminCall, work: Callable[[Store], T]) -> T:
    def in_turn() -> T:
        with call.services.catalogue.store() as store:
            return work(store)

    return await _run(call, in_turn)


def _note(store: Store, call: AdminCall, kind: str, why: str, record: KeyRecord, **more: str) -> None:
    """Commit the event of the change that follows. If that fails, no key changes; a new one would never be
    returned."""
    whose = {"name": record.tenant, "role": record.role} if record.role else {"tenant": record.tenant}
    with store.write() as connection:
        events.append(
            connection,
            at=wall_s(),
            actor=call.caller.name,
            kind=kind,
            subject=f"key/{record.id}",
            why=why or f"of {record.tenant}",
            document={**whose, **more},
            cluster=call.services.control.plan.cluster,
        )


HANDLERS: Final[Mapping[str, Handler]] = {
    "keys": keys,
    "createKey": create,
    "revokeKey": revoke,
    "rotateKey": rotate,
}
