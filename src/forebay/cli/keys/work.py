"""API keys in files of this machine, or behind an admin API."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

from forebay.cli import settings
from forebay.cli.deploy.client import Admin
from forebay.cli.settings import UserError
from forebay.control.api.documents import KeyDocument, KeyDocuments, NewKeyDocument, key
from forebay.control.keyring import KeyRefused, KeyRing, key_ring
from forebay.control.plan import Places
from forebay.obs.clock import wall_s
from forebay.registry.keys import KeyFileError

T = TypeVar("T")
PATH = "/v1/keys"


class Keys(Protocol):
    """All keys of a cluster. Every method raises `UserError`."""

    required: bool
    """Whether the admin API requires keys, as far as known."""

    def all(self) -> tuple[KeyDocument, ...]:
        """All keys, without their secrets."""

    def create(self, holder: str, role: str, expires_s: int | None) -> NewKeyDocument:
        """Create a key of the admin API, or without a role one of a tenant."""

    def revoke(self, id: str) -> None:
        """Revoke a key."""

    def rotate(self, id: str, overlap_s: int) -> NewKeyDocument:
        """Replace a key."""


class _LocalKeys:
    """Keys in files: whoever can write them has all permissions."""

    def __init__(self, ring: KeyRing, required: bool) -> None:
        self._ring = ring
        self.required = required

    def all(self) -> tuple[KeyDocument, ...]:
        now = wall_s()
        return tuple(key(record, now) for record in _tried(self._ring.all))

    def create(self, holder: str, role: str, expires_s: int | None) -> NewKeyDocument:
        now = wall_s()
        made = _tried(lambda: self._ring.create(holder, role, now, None if expires_s is None else now + expires_s))
        return NewKeyDocument(made.key, key(made.record, now))

    def revoke(self, id: str) -> None:
        _tried(lambda: self._ring.revoke(id, wall_s()))

    def rotate(self, id: str, overlap_s: int) -> NewKeyDocument:
        now = wall_s()
        made = _tried(lambda: self._ring.rotate(id, now, overlap_s))
        return NewKeyDocument(made.key, key(made.record, now))


class _RemoteKeys:
    """Keys behind an admin API: the caller is the holder of the key that is sent."""

    required = True

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def all(self) -> tuple[KeyDocument, ...]:
        return self._admin.get(PATH, KeyDocuments).keys

    def create(self, holder: str, role: str, expires_s: int | None) -> NewKeyDocument:
        whose = {"name": holder, "role": role} if role else {"tenant": holder}
        return self._admin.send("POST", PATH, NewKeyDocument, {**whose, "expires_s": expires_s})

    def revoke(self, id: str) -> None:
        self._admin.send("POST", f"{PATH}/{quote(id, safe='')}/revoke", KeyDocument, None)

    def rotate(self, id: str, overlap_s: int) -> NewKeyDocument:
        body = {"overlap_s": overlap_s}
        return self._admin.send("POST", f"{PATH}/{quote(id, safe='')}/rotate", NewKeyDocument, body)


def local_keys(file: Path | None) -> Keys:
    """The keys of a cluster file. Raises `UserError`."""
    cluster = settings.load_cluster(settings.read_file(file), [], os.environ)
    ring = key_ring(cluster, Places(settings.home() / "run" / cluster.name))
    return _LocalKeys(ring, cluster.admin.auth == "keys")


def remote_keys(admin: Admin) -> Keys:
    """The keys of a running cluster."""
    return _RemoteKeys(admin)


def _tried(work: Callable[[], T]) -> T:
    try:
        return work()
    except KeyRefused as error:
        raise UserError(error.text) from error
    except KeyFileError as error:
        raise UserError(f"{error}.") from error
