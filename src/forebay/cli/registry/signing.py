"""Sign as a publisher: locally, as the key never leaves this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from forebay.cli import settings
from forebay.cli.settings import UserError
from forebay.cli.view.screen import Screen
from forebay.core.registry.manifest import BadManifest
from forebay.registry.artifacts import describe
from forebay.registry.bundles import bundle_bytes, read_bundle
from forebay.registry.catalogue import Actor, Listed, Registry
from forebay.registry.proved import signed_message
from forebay.registry.signing import read_signer

if TYPE_CHECKING:
    from forebay.cli.registry.remote import RemoteRegistry


def sign(
    registry: "Registry | RemoteRegistry", name: tuple[str, str], key: Path, files: Path | None, by: Actor
) -> Listed:
    """Sign the artifact of a revision; with `files` only if it consists of exactly those. Raises `UserError`,
    `SourceError`."""
    signer = read_signer(key)
    revision = registry.show(*name).revision
    if files is not None:
        found = _digest(files)
        if found != revision.artifact:
            text = f"{files} has the digest {found}, but {revision.name} has {revision.artifact}"
            raise UserError(f"{text}. Nothing was signed.")
    return registry.sign(revision.model, revision.id, signer.prove(signed_message(revision.artifact)), by)


def attach(registry: "Registry | RemoteRegistry", name: tuple[str, str], bundle: Path, by: Actor) -> Listed:
    """Add a signature made by `model_signing`. Raises `UserError`, `SourceError`."""
    content = bundle_bytes(bundle)
    read = read_bundle(content, str(bundle))
    if isinstance(registry, Registry):
        return registry.attach(*name, read, by)
    return registry.attach(*name, content)


def _digest(files: Path) -> str:
    if not files.exists():
        raise UserError(f"{files}: no such file or folder.")
    try:
        with Screen(settings.screen(stderr=True)) as screen:
            return describe(files, screen.progress(str(files))).digest
    except OSError as error:
        raise UserError(f"{files}: cannot be read ({error.strerror}).") from error
    except BadManifest as error:
        raise UserError(f"{files}: {error}.") from error
