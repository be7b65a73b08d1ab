"""Settings of the registry and the store in the cluster file."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from forebay.core.errors import Conflict
from forebay.core.registry.approval import ApprovalRules
from forebay.core.section import Section

_STORE: Final = re.compile(r"sqlite:///.+|postgres(ql)?://.+")
_PASSWORD: Final = re.compile(r"(?<=//)[^/@]*:[^/@]*@|[?&]password=[^&]*")


class EncryptionSettings(Section):
    """What wraps the keys of encrypted artifacts: exactly one of these."""

    key_file: Annotated[str, Field(min_length=1)] | None = None
    """File with 32 random bytes in base64."""
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Command line of a key management service: it is called with `wrap` or `unwrap`, reads base64 on standard input
    and writes base64 to standard output."""


class RegistrySettings(Section):
    """Where models are registered, and what is required before one is served (`source: registry:…`)."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder of registered files; none: `registry` below `FOREBAY_HOME`."""
    key_file: Annotated[str, Field(min_length=1)] | None = None
    """PEM file with the Ed25519 key that signs approvals, created when first needed; none: `registry.key` below
    `FOREBAY_HOME`. Clusters that share a store must share it too."""
    approvals_min: Annotated[int, Field(ge=0, le=10)] = 0
    """How many people must approve a revision before it is served. 0: no approval is needed."""
    self_approval: bool = False
    """Whether approval by the person who registered the revision counts."""

    publishers: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """PEM files with public keys: Ed25519, or P-256, P-384 and P-521 for signatures of `model_signing`. If any are
    given, an artifact is served only if one of them has signed it (`forebay registry sign`)."""

    encryption: EncryptionSettings | None = None
    """Encrypt what is registered from now on; none: store it unencrypted."""
    memory_folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder on a tmpfs that encrypted artifacts are decrypted to when served; none: `/dev/shm/forebay-UID`."""

    def rules(self) -> ApprovalRules:
        """The approval rules."""
        return ApprovalRules(self.approvals_min, self.self_approval)


def encryption_conflicts(registry: Any) -> Iterator[Conflict]:
    """Encryption with no key, or with two."""
    section = registry.get("encryption") if isinstance(registry, Mapping) else None
    if isinstance(section, Mapping) and bool(section.get("key_file")) == bool(section.get("command")):
        found = "both" if section.get("command") else "neither"
        yield Conflict("registry.encryption", found, "`key_file` or `command`")


def store_conflicts(url: Any) -> Iterator[Conflict]:
    """Invalid store URLs: of an unknown kind, or with a password, which would be visible in many places."""
    if not isinstance(url, str):
        return
    if _PASSWORD.search(url):
        found = f'"{_PASSWORD.sub("***", url)}"'
        yield Conflict("store", found, "a URL without a password; PostgreSQL takes it from PGPASSWORD or ~/.pgpass")
    elif not _STORE.fullmatch(url):
        yield Conflict("store", f'"{url}"', "sqlite:///PATH or postgresql://USER@HOST/NAME")
