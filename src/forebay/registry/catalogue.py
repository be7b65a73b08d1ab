"""The registry: revisions with their metadata, approvals and aliases.

A revision names an artifact by its digest, the engine and its settings, and never changes. Everything read back is
verified (see `proved`), and so is every byte of the files before they are served.
"""

import fcntl
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Table, delete, insert, select, update

from forebay.core.model import Task
from forebay.core.registry.approval import (
    ApprovalRules,
    ApprovalState,
    Role,
    Standing,
    Step,
    Taken,
    problem,
    standing,
)
from forebay.core.registry.manifest import BadManifest, Manifest
from forebay.core.registry.statements import mismatch, signed_bytes
from forebay.core.revision import REVISION_ID, revision_id
from forebay.obs.clock import wall_s
from forebay.registry import proved
from forebay.registry.artifacts import Artifacts
from forebay.registry.bundles import Bundle
from forebay.registry.proved import RegistryError, Revision, Setting, StepDocument, Tampered
from forebay.registry.signing import Proof, Signer, exactly, is_signed
from forebay.registry.sources import Progress, SourceError
from forebay.registry.uploads.staging import Lacking, Staging
from forebay.registry.vault import Vault
from forebay.store import events
from forebay.store.database import Store
from forebay.store.schema import ALIASES, APPROVALS, ARTIFACTS, REVISIONS

ALIAS_CHARS_MAX: Final = 64
SIGNATURES_MAX: Final = 100
"""Per artifact, besides those of publishers: all of them are verified whenever it is read."""


class Actor(msgspec.Struct, frozen=True):
    """The author of a change."""

    name: str
    role: Role = Role.ADMIN


class Listed(msgspec.Struct, frozen=True):
    """A revision with its approval status and aliases."""

    revision: Revision
    standing: Standing
    aliases: tuple[str, ...]
    size_bytes: int
    signed_by: tuple[str, ...] = ()
    """Public keys that have signed the artifact, base64."""


class Description(msgspec.Struct, frozen=True):
    """The description of an artifact for its registration."""

    model: str
    source: str
    task: Task
    engine: str
    settings: Mapping[str, Setting]
    metadata: Mapping[str, str] = {}


class Registry:
    """The catalogue in a store, and the files below a folder.

    `signer` signs approvals. With `publishers` (public keys), artifacts not signed by any of them are not served. If
    it `encrypts`, new artifacts are kept in the `vault`.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        signer: Signer,
        rules: ApprovalRules,
        *,
        publishers: Collection[str] = (),
        vault: Vault,
        encrypts: bool = False,
    ) -> None:
        self._artifacts = Artifacts(folder)
        self._vault = vault
        self._encrypts = encrypts
        self._store = store
        self._folder = folder
        self._signer = signer
        self._rules = rules
        self._publishers = publishers
        self.uploads = staging(folder, vault, encrypts=encrypts)

    def add(self, what: Description, path: Path, by: Actor, progress: Progress) -> Listed:
        """Register the file or folder at a path; an existing revision stays as it is. Raises `RegistryError`."""
        with self._in_use():
            try:
                manifest = (self._vault if self._encrypts else self._artifacts).take(path, progress)
                if not self._encrypts:
                    self._artifacts.mend(manifest)
                    self._artifacts.tree(manifest, progress)
            except (SourceError, BadManifest, OSError) as error:
                raise RegistryError(f"{what.source}: {error}") from error
            id = revision_id(manifest.digest, what.engine, what.settings)
            with self._store.write() as connection:
                known = (REVISIONS.c.model == what.model) & (REVISIONS.c.id == id)
                if not connection.execute(select(REVISIONS.c.id).where(known)).all():
                    self._write(connection, id, what, manifest, by)
                listed = self._listed(connection, what.model, id)
                its, wanted = listed.revision, (manifest.digest, what.engine, dict(what.settings))
                if (its.artifact, its.engine, dict(its.settings)) != wanted:
                    raise RegistryError(f"{its.name}: is another artifact or has other settings, but the same id")
                return listed

    def lacking(self, manifest: Manifest) -> tuple[Lacking, ...]:
        """The contents of an artifact to be uploaded. Raises `SourceError` if there is no room for them."""
        return () if self._is_sealed(manifest) else self.uploads.lacking(manifest)

    @contextmanager
    def sent(self, manifest: Manifest, name: str, progress: Progress) -> Iterator[Path]:
        """The files of an uploaded artifact, for `add`. Raises `SourceError` if they do not match the manifest."""
        with self._in_use():
            if self._is_sealed(manifest):
                yield self._vault.tree(manifest, progress)
                return
            with self.uploads.whole(manifest, name, progress) as path:
                yield path

    def _is_sealed(self, manifest: Manifest) -> bool:
        return self._encrypts and self._vault.has(manifest.digest)

    def _write(self, connection: Connection, id: str, what: Description, manifest: Manifest, by: Actor) -> None:
        now = wall_s()
        if not connection.execute(select(ARTIFACTS.c.digest).where(ARTIFACTS.c.digest == manifest.digest)).all():
            _insert(
                connection,
                ARTIFACTS,
                digest=manifest.digest,
                source=what.source,
                manifest=proved.manifest_text(manifest),
                size_bytes=manifest.size_bytes,
                envelope="aes-256-gcm" if self._encrypts else "",
                signatures="[]",
                added_at=now,
                added_by=by.name,
            )
        revision = Revision(
            model=what.model,
            id=id,
            artifact=manifest.digest,
            manifest=proved.sha256(proved.manifest_text(manifest)),
            task=what.task,
            engine=what.engine,
            settings=dict(what.settings),
            source=what.source,
            created_at=now,
            created_by=by.name,
            metadata=dict(what.metadata),
        )
        document = msgspec.json.encode(revision).decode()
        digest = proved.sha256(document)
        _insert(
            connection,
            REVISIONS,
            id=id,
            model=what.model,
            artifact=manifest.digest,
            document=document,
            digest=digest,
            created_at=now,
            created_by=by.name,
        )
        self._take(connection, revision, digest, Taken(Step.ADD, by.name, now, f"from {what.source}"), by.role)

    def step(self, model: str, name: str, step: Step, by: Actor, reason: str = "") -> Listed:
        """Approve, reject or resubmit a revision, named by its id or an alias. Raises `RegistryError`."""
        with self._store.write() as connection:
            revision, digest = proved.revision(connection, model, proved.resolve(connection, model, name))
            self._take(connection, revision, digest, Taken(step, by.name, wall_s(), reason), by.role)
            return self._listed(connection, model, revision.id)

    def _take(self, connection: Connection, revision: Revision, digest: str, new: Taken, role: Role) -> None:
        taken, previous = proved.steps(connection, revision, digest, self._signer.public)
        why_not = problem(taken, new, role, self._rules)
        if why_not:
            raise RegistryError(f"{revision.name}: {why_not}")
        number = len(taken) + 1
        step = StepDocument(
            model=revision.model,
            revision=revision.id,
            document=digest,
            number=number,
            step=new.step,
            by=new.by,
            role=role.name.lower(),
            at=new.at,
            reason=new.reason,
            previous=previous,
        )
        document = msgspec.json.encode(step)
        _insert(
            connection,
            APPROVALS,
            model=revision.model,
            revision=revision.id,
            number=number,
            document=document.decode(),
            signature=self._signer.sign(document),
        )
        events.append(
            connection,
            at=new.at,
            actor=new.by,
            kind=f"revision.{new.step}",
            subject=revision.subject,
            why=new.reason,
            document={"record": proved.sha256(document.decode())},
        )

    def revisions(self, model: str | None = None) -> list[Listed]:
        """All revisions, of a model or of all, by model and age. Raises `Tampered`."""
        asked = select(REVISIONS.c.model, REVISIONS.c.id).order_by(REVISIONS.c.model, REVISIONS.c.created_at)
        with self._store.read() as connection:
            rows = connection.execute(asked if model is None else asked.where(REVISIONS.c.model == model)).all()
            return [self._listed(connection, row.model, row.id) for row in rows]

    def show(self, model: str, name: str) -> Listed:
        """A revision, by its id or an alias. Raises `RegistryError`."""
        with self._store.read() as connection:
            return self._listed(connection, model, proved.resolve(connection, model, name))

    def set_alias(self, model: str, alias: str, name: str, by: Actor) -> Listed:
        """Set an alias to a revision, replacing its previous target. Raises `RegistryError`."""
        with self._store.write() as connection:
            listed = self._listed(connection, model, proved.resolve(connection, model, name))
            id, now = listed.revision.id, wall_s()
            if len(alias) > ALIAS_CHARS_MAX:
                raise RegistryError(f"{model}@{alias}: an alias has at most {ALIAS_CHARS_MAX} characters")
            if REVISION_ID.fullmatch(alias):  # also of one that may be registered later
                raise RegistryError(f"{model}@{alias}: has the form of a revision's id, and cannot be an alias")
            before = proved.resolve(connection, model, alias)
            if before == id:
                return listed
            connection.execute(delete(ALIASES).where((ALIASES.c.model == model) & (ALIASES.c.alias == alias)))
            _insert(connection, ALIASES, model=model, alias=alias, revision=id, changed_at=now, changed_by=by.name)
            events.append(
                connection,
                at=now,
                actor=by.name,
                kind="alias.set",
                subject=listed.revision.subject,
                why=f"{alias} refers to it",
                document={"alias": alias, "before": "" if before == alias else before},
            )
            return self._listed(connection, model, id)

    def sign(self, model: str, name: str, proof: Proof, by: Actor) -> Listed:
        """Add a publisher's signature of `signed_message` to a revision's artifact. Raises `RegistryError`."""
        with self._store.write() as connection:
            listed = self._listed(connection, model, proved.resolve(connection, model, name))
            revision = listed.revision
            if not is_signed(proved.signed_message(revision.artifact), proof.signature, proof.public):
                text = f"{revision.name}: not a signature of this artifact by the key {proof.public}"
                raise RegistryError(text)
            return self._signed(connection, listed, proved.Signature(*proof, by.name, wall_s()))

    def attach(self, model: str, name: str, bundle: Bundle, by: Actor) -> Listed:
        """Add a signature made by `model_signing` of the files of a revision. Raises `RegistryError`."""
        with self._store.write() as connection:
            listed = self._listed(connection, model, proved.resolve(connection, model, name))
            revision, statement = listed.revision, exactly(bundle.statement)
            message = signed_bytes(statement)
            public = next((each for each in self._publishers if is_signed(message, bundle.signature, each)), "")
            if not public:
                raise RegistryError(f"{revision.name}: the signature was not made by a key in `registry.publishers`")
            why_not = mismatch(statement, proved.manifest(connection, revision.artifact, revision.manifest))
            if why_not:
                raise RegistryError(f"{revision.name}: not a signature of this artifact: {why_not}")
            made = proved.Signature(public, bundle.signature, by.name, wall_s(), bundle.statement)
            return self._signed(connection, listed, made)

    def _signed(self, connection: Connection, listed: Listed, new: proved.Signature) -> Listed:
        """Add a signature, unless there is one by this key. Raises `RegistryError` if the limit is reached."""
        revision = listed.revision
        if new.public in listed.signed_by:
            return listed
        if len(listed.signed_by) >= SIGNATURES_MAX and new.public not in self._publishers:
            raise RegistryError(f"{revision.name}: its artifact has {SIGNATURES_MAX} signatures, the most allowed")
        manifest = proved.manifest(connection, revision.artifact, revision.manifest)
        both = (*proved.signatures(connection, manifest), new)
        own = ARTIFACTS.c.digest == revision.artifact
        connection.execute(update(ARTIFACTS).where(own).values(signatures=msgspec.json.encode(both).decode()))
        events.append(
            connection,
            at=new.at,
            actor=new.by,
            kind="artifact.signed",
            subject=revision.subject,
            why=f"with the key {new.public}",
            document={"public": new.public},
        )
        return self._listed(connection, revision.model, revision.id)

    def may_serve(self, model: str, name: str) -> Listed:
        """A revision that may be served, by its id or an alias. Raises `RegistryError`, which says why it may not."""
        listed = self.show(model, name)
        who = listed.revision.name
        if listed.standing.state is not ApprovalState.APPROVED:
            raise RegistryError(f"{who}: is {listed.standing.state}: {listed.standing.why}")
        if self._publishers and not set(self._publishers) & set(listed.signed_by):
            others = f"; those of {', '.join(listed.signed_by)} do not count" if listed.signed_by else ""
            how = f"`forebay registry sign {who}` adds one"
            raise RegistryError(f"{who}: has no signature of a key in `registry.publishers`{others}; {how}")
        return listed

    def open(self, model: str, name: str, progress: Progress) -> tuple[Listed, Path]:
        """A revision that may be served, and its files, with every byte verified. Raises `RegistryError`."""
        listed = self.may_serve(model, name)
        who = listed.revision.name
        with self._store.read() as connection:
            manifest = proved.manifest(connection, listed.revision.artifact, listed.revision.manifest)
        try:
            keeper = self._keeper(manifest)
            wrong = keeper.check(manifest, progress)
            path = keeper.tree(manifest, progress)
        except (SourceError, OSError) as error:
            raise RegistryError(f"{who}: {error}") from error
        if wrong:
            raise Tampered("\n".join(f"{who}: {each.path}: {each.found}" for each in wrong))
        return listed, path

    def verify(self, progress: Progress, model: str | None = None) -> list[str]:
        """Verify the event log, documents, approval steps and files; returns a sentence for each problem."""
        with self._store.read() as connection:
            log = events.verify(connection)
            rows = connection.execute(select(REVISIONS.c.model, REVISIONS.c.id)).all()
        wrong = [f"event log: {log}"] if log else []
        checked: dict[str, list[str]] = {}
        for row in sorted(rows, key=tuple):
            if model not in (None, row.model):
                continue
            try:
                with self._store.read() as connection:
                    revision = self._listed(connection, row.model, row.id).revision
                    manifest = proved.manifest(connection, revision.artifact, revision.manifest)
                if manifest.digest not in checked:
                    found = self._keeper(manifest).check(manifest, progress)
                    checked[manifest.digest] = [f"{each.path}: {each.found}" for each in found]
                wrong += [f"{revision.name}: {text}" for text in checked[manifest.digest]]
            except RegistryError as error:
                wrong.append(str(error))
            except (SourceError, OSError) as error:
                wrong.append(f"{row.model}@{row.id}: {error}")
        return wrong

    def sweep(self) -> int:
        """Remove files that no revision refers to; returns the number of bytes freed."""
        with self._in_use(alone=True), self._store.read() as connection:
            digests = connection.execute(select(ARTIFACTS.c.digest)).scalars().all()
            keep = [proved.manifest(connection, digest) for digest in digests]
            open_ones = [manifest for manifest in keep if not self._vault.has(manifest.digest)]
            return self._artifacts.sweep(open_ones) + self._vault.sweep(keep) + self.uploads.sweep()

    def cache(self, revision: Revision, otherwise: Path) -> Path:
        """Where to keep files derived from a revision's: in memory, too, if those are encrypted."""
        return self._vault.cache(revision.artifact) if self._vault.has(revision.artifact) else otherwise

    def _keeper(self, manifest: Manifest) -> Artifacts | Vault:
        """The store that holds the files of an artifact."""
        return self._vault if self._vault.has(manifest.digest) else self._artifacts

    @contextmanager
    def _in_use(self, alone: bool = False) -> Iterator[None]:
        """Lock the registry, so that `sweep` does not remove files that are being added."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield

    def _listed(self, connection: Connection, model: str, id: str) -> Listed:
        revision, digest = proved.revision(connection, model, id)
        manifest = proved.manifest(connection, revision.artifact, revision.manifest)
        taken, _ = proved.steps(connection, revision, digest, self._signer.public)
        named = proved.aliases(connection, revision)
        signed_by = tuple(each.public for each in proved.signatures(connection, manifest))
        return Listed(revision, standing(taken, self._rules), named, manifest.size_bytes, signed_by)


def staging(folder: Path, vault: Vault, *, encrypts: bool) -> Staging:
    """Where a registry keeps uploads: on its disk, or in memory if it encrypts."""
    if encrypts:
        return Staging(vault.uploads, lambda sha256: None, vault.make_ready)
    return Staging(folder / "uploads", Artifacts(folder).find)


def _insert(connection: Connection, table: Table, **values: Any) -> None:
    connection.execute(insert(table).values(values))
