"""Reads revisions from the store and verifies them: documents by digest, approval steps by signature and event log.

Any mismatch raises `Tampered`, which names it.
"""

import hashlib
from typing import TypeVar

import msgspec
from sqlalchemy import Connection, select

from forebay.core.model import Task
from forebay.core.registry.approval import Step, Taken
from forebay.core.registry.manifest import BadManifest, File, Manifest, make_manifest
from forebay.core.registry.statements import mismatch, signed_bytes
from forebay.core.revision import revision_id
from forebay.registry.signing import exactly, is_signed
from forebay.store import events
from forebay.store.schema import ALIASES, APPROVALS, ARTIFACTS, REVISIONS
from forebay.wire.documents import UNREADABLE

T = TypeVar("T")
Setting = int | float | str | bool


class RegistryError(Exception):
    """A request cannot be fulfilled; the text says why, and what is possible."""


class Unknown(RegistryError):  # noqa: N818 - states the condition
    """There is no such revision; the text lists the existing ones."""


class Tampered(RegistryError):  # noqa: N818 - states the condition
    """Something was modified; the text names it."""


class Revision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A deployable revision. Equal artifact, engine and settings yield the same `id`."""

    model: str
    id: str
    artifact: str
    """Digest of the artifact."""
    manifest: str
    """Digest of the stored manifest, including sizes, which the artifact's digest does not cover."""
    task: Task
    engine: str
    settings: dict[str, Setting]
    source: str
    created_at: float
    created_by: str
    metadata: dict[str, str] = {}
    """Information for people: precision, context length, licence, model card, and measured figures."""

    @property
    def name(self) -> str:
        """The notation used by people."""
        return f"{self.model}@{self.id}"

    @property
    def subject(self) -> str:
        """The subject of its events."""
        return f"model/{self.model}/{self.id}"


class StepDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The signed document of an approval step. `document`, `previous`: digests of the revision's and the previous
    step's."""

    model: str
    revision: str
    document: str
    number: int
    step: Step
    by: str
    role: str
    at: float
    reason: str
    previous: str


def resolve(connection: Connection, model: str, name: str) -> str:
    """The id that an alias refers to, else the name itself. An id is always that revision's."""
    own = select(REVISIONS.c.id).where((REVISIONS.c.model == model) & (REVISIONS.c.id == name))
    if connection.execute(own).scalar() is not None:
        return name
    alias = select(ALIASES.c.revision).where((ALIASES.c.model == model) & (ALIASES.c.alias == name))
    return connection.execute(alias).scalar() or name


def revision(connection: Connection, model: str, id: str) -> tuple[Revision, str]:
    """A revision, and the digest of its document. Raises `Unknown`, `Tampered`."""
    who = f"{model}@{id}"
    asked = select(REVISIONS.c.document, REVISIONS.c.digest, REVISIONS.c.artifact)
    row = connection.execute(asked.where((REVISIONS.c.model == model) & (REVISIONS.c.id == id))).one_or_none()
    if row is None:
        raise Unknown(f"{who}: there is no such revision; {_known(connection, model)}")
    if sha256(row.document) != row.digest:
        raise Tampered(f"{who}: its document was changed: it has another digest")
    found = _decode(row.document, Revision, f"{who}: its document")
    expected = revision_id(found.artifact, found.engine, found.settings)
    if (found.model, found.id, found.artifact) != (model, id, row.artifact) or expected != id:
        raise Tampered(f"{who}: its document is that of {found.model}@{expected}")
    return found, row.digest


def _known(connection: Connection, model: str) -> str:
    """A text listing the revisions of a model with their aliases, newest first."""
    asked = select(REVISIONS.c.id).where(REVISIONS.c.model == model)
    ids = connection.execute(asked.order_by(REVISIONS.c.created_at.desc(), REVISIONS.c.id)).scalars().all()
    named = select(ALIASES.c.revision, ALIASES.c.alias).where(ALIASES.c.model == model)
    aliases = connection.execute(named.order_by(ALIASES.c.alias)).all()
    if not ids:
        return f"no revision of {model} is registered"
    names = {id: ", ".join(each.alias for each in aliases if each.revision == id) for id in ids}
    return f"there is: {', '.join(f'{id} ({name})' if name else id for id, name in names.items())}"


def steps(connection: Connection, of: Revision, digest: str, public: str) -> tuple[tuple[Taken, ...], str]:
    """The approval steps, and the digest of the last one. Raises `Tampered`."""
    asked = select(APPROVALS.c.document, APPROVALS.c.signature).order_by(APPROVALS.c.number)
    rows = connection.execute(asked.where((APPROVALS.c.model == of.model) & (APPROVALS.c.revision == of.id))).all()
    previous, taken = "", list[Taken]()
    for number, row in enumerate(rows, 1):
        record = f"{of.name}: record {number} of its approval"
        if not is_signed(row.document.encode(), row.signature, public):
            raise Tampered(f"{record} or its signature was changed, or another registry has signed it")
        step = _decode(row.document, StepDocument, record)
        if (step.model, step.revision, step.number) != (of.model, of.id, number):
            raise Tampered(f"{record} belongs to {step.model}@{step.revision}, number {step.number}")
        if step.previous != previous:
            raise Tampered(f"{record} does not follow the previous one")
        if step.document != digest:
            raise Tampered(f"{record} is about a document other than the revision's")
        taken.append(Taken(step.step, step.by, step.at, step.reason))
        previous = sha256(row.document)
    _all_there(connection, of, len(rows))
    return tuple(taken), previous


def _all_there(connection: Connection, of: Revision, records: int) -> None:
    """Signatures do not reveal that the last records were removed; the event log does."""
    noted = [each for each in events.since(connection, subject=of.subject) if each.kind.startswith("revision.")]
    if len(noted) != records:
        raise Tampered(f"{of.name}: has {records} records of approval, but the event log has {len(noted)}")


def manifest(connection: Connection, digest: str, proof: str | None = None) -> Manifest:
    """The manifest of an artifact; `proof`: its digest according to a revision. Raises `Tampered`."""
    what = f"artifact {digest}: its manifest"
    text = connection.execute(select(ARTIFACTS.c.manifest).where(ARTIFACTS.c.digest == digest)).scalar()
    if text is None:
        raise Tampered(f"{what} is gone")
    files, lone = _decode(text, tuple[tuple[File, ...], bool], what)
    try:
        found = make_manifest(files, lone)
    except BadManifest as error:
        raise Tampered(f"{what} was changed: {error}") from error
    if found.digest != digest or proof not in (None, sha256(text)):
        raise Tampered(f"{what} was changed")
    return found


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A publisher's signature of an artifact: public key and signature, base64; who added it, and when."""

    public: str
    signature: str
    by: str
    at: float
    statement: str = ""
    """The statement signed by `model_signing`, base64; empty: the signature is of `signed_message`."""


def signed_message(digest: str) -> bytes:
    """The message that a publisher signs for an artifact."""
    return f"forebay artifact v1\n{digest}\n".encode()


def signatures(connection: Connection, of: Manifest) -> tuple[Signature, ...]:
    """The signatures of an artifact. Raises `Tampered` if one does not match its key."""
    what = f"artifact {of.digest}: a signature"
    text = connection.execute(select(ARTIFACTS.c.signatures).where(ARTIFACTS.c.digest == of.digest)).scalar() or "[]"
    found = _decode(text, tuple[Signature, ...], what)
    for each in found:
        if not _is_one(each, of):
            raise Tampered(f"{what} was changed: it is not by {each.public}")
    return found


def _is_one(signature: Signature, of: Manifest) -> bool:
    if not signature.statement:
        return is_signed(signed_message(of.digest), signature.signature, signature.public)
    try:
        statement = exactly(signature.statement)
    except ValueError:
        return False
    return is_signed(signed_bytes(statement), signature.signature, signature.public) and not mismatch(statement, of)


def aliases(connection: Connection, of: Revision) -> tuple[str, ...]:
    """The aliases of a revision."""
    named = select(ALIASES.c.alias).where((ALIASES.c.model == of.model) & (ALIASES.c.revision == of.id))
    return tuple(sorted(connection.execute(named).scalars()))


def manifest_text(manifest: Manifest) -> str:
    """The stored form of a manifest."""
    return msgspec.json.encode((manifest.files, manifest.lone)).decode()


def sha256(text: str) -> str:
    """The SHA-256 of a document."""
    return hashlib.sha256(text.encode()).hexdigest()


def _decode(text: str, type: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(text, type=type)
    except UNREADABLE as error:
        raise Tampered(f"{what} was changed: {error}") from error
