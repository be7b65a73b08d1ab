"""The API keys of a cluster's tenants and of its admin API: create, revoke, rotate. Only digests are stored."""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from forebay.control.plan import Places, admin_keys_path, keys_path
from forebay.core.cluster import Cluster
from forebay.core.tenancy import ENTROPY_BYTES, KeyRecord, mint
from forebay.registry.keys import KEYS_MAX, Keys, change_keys, read_keys

T = TypeVar("T")
Note = Callable[[KeyRecord], None]
"""Records a change of a key in the history. Called before the change: if it raises, no key changes."""


class KeyRefused(Exception):  # noqa: N818 - states the condition
    """A key cannot be created or changed. `param`: what does not exist; empty: the key exists but is no longer
    valid."""

    def __init__(self, text: str, param: str = "") -> None:
        self.text, self.param = text, param
        super().__init__(text)


class NewKey(NamedTuple):
    """A new key, which is shown once, and its stored record."""

    key: str
    record: KeyRecord


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Two files, as gateways never read that of the admin API. Times are seconds since the epoch.

    Every method blocks, and raises `KeyFileError` if a file cannot be read or written.
    """

    tenants: tuple[str, ...]
    of_tenants: Path
    of_admins: Path

    def all(self) -> Keys:
        """The records of all keys, those of tenants first."""
        return tuple(record for path in self._paths() for record in read_keys(path))

    def create(self, holder: str, role: str, now: float, expires: float | None, note: Note | None = None) -> NewKey:
        """Create an admin key for a holder; without a role, a key of a tenant. Raises `KeyRefused`."""
        if not role and holder not in self.tenants:
            there = ", ".join(self.tenants) or "none; add it under `tenants:` and set `gateway.auth: keys`"
            raise KeyRefused(f"There is no tenant {holder!r} in the cluster file; there is: {there}.", "tenant")

        def add(records: Keys) -> tuple[Keys, NewKey]:
            made = _new(records, holder, role, now, expires)
            if note is not None:
                note(made.record)
            return (*_with_room(records, now), made.record), made

        return change_keys(self.of_admins if role else self.of_tenants, add)

    def revoke(self, id: str, now: float, note: Note | None = None) -> KeyRecord:
        """Revoke a key. Raises `KeyRefused`."""

        def end(records: Keys) -> tuple[Keys, KeyRecord]:
            old = _found(records, id)
            if old.revoked is not None:
                return records, old
            ended = replace(old, revoked=now)
            if note is not None:
                note(ended)
            return _with(records, ended), ended

        return self._changed(id, end)

    def rotate(self, id: str, now: float, overlap_s: float, note: Note | None = None) -> NewKey:
        """Create a key for the same holder, valid for as long as the old one was; the old one ends after the overlap.

        Raises `KeyRefused`.
        """

        def swap(records: Keys) -> tuple[Keys, NewKey]:
            old = _found(records, id)
            if state(old, now) != "good":
                whose = f"--admin {old.role} --name {old.tenant}" if old.role else f"--tenant {old.tenant}"
                raise KeyRefused(f"Key {id} is {state(old, now)}: create one with `forebay keys create {whose}`.")
            if old.replaced_by:  # it ends with its overlap, which is no lifetime for another one
                raise KeyRefused(f"Key {id} is being replaced by key {old.replaced_by}: rotate that one.")
            made = _new(records, old.tenant, old.role, now, old.expires and now + old.expires - old.created)
            if note is not None:
                note(made.record)
            until = now + overlap_s
            ended = replace(old, expires=min(until, old.expires or until)) if overlap_s else replace(old, revoked=now)
            ended = replace(ended, replaced_by=made.record.id)
            return (*_with_room(_with(records, ended), now), made.record), made

        return self._changed(id, swap)

    def _paths(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((self.of_tenants, self.of_admins)))

    def _changed(self, id: str, change: Callable[[Keys], tuple[Keys, T]]) -> T:
        for path in self._paths():
            if any(record.id == id for record in read_keys(path)):
                return change_keys(path, change)
        raise _unknown(id)


def key_ring(cluster: Cluster, places: Places) -> KeyRing:
    """The keys of a cluster."""
    tenants = tuple(tenant.name for tenant in cluster.tenants)
    return KeyRing(tenants, keys_path(cluster, places), admin_keys_path(cluster, places))


def state(record: KeyRecord, now: float) -> str:
    """`good`, `expired` or `revoked`."""
    if record.revoked is not None:
        return "revoked"
    return "expired" if record.expires is not None and now >= record.expires else "good"


def _new(records: Keys, holder: str, role: str, now: float, expires: float | None) -> NewKey:
    taken = {record.id for record in records}
    while True:
        made = NewKey(*mint(holder, secrets.token_bytes(ENTROPY_BYTES), now, expires, role))
        if made.record.id not in taken:
            return made


def _found(records: Keys, id: str) -> KeyRecord:
    for record in records:
        if record.id == id:
            return record
    raise _unknown(id)  # removed concurrently


def _unknown(id: str) -> KeyRefused:
    return KeyRefused(f"There is no key {id!r}. `forebay keys list` shows those there are.", "key")


def _with(records: Keys, changed: KeyRecord) -> Keys:
    return tuple(changed if record.id == changed.id else record for record in records)


def _with_room(records: Keys, now: float) -> Keys:
    """The keys without the one that ended first, if there is no room for another: nobody removes them by hand."""
    ended = [record for record in records if state(record, now) != "good"] if len(records) >= KEYS_MAX else []
    first = min(ended, key=lambda each: min(each.revoked or math.inf, each.expires or math.inf), default=None)
    return tuple(record for record in records if record is not first)
