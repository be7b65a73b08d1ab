"""Authentication: tenants, their API keys, and verification of presented keys.

A key reads `fb-ID-SECRET`. The secret is 256 random bits, so storing a plain SHA-256 of the key is safe: there is no
dictionary to try, and a slow password hash would only cost time on every request.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from forebay.core.admission import Band
from forebay.core.errors import Code

ID_BYTES: Final = 5
SECRET_BYTES: Final = 32
ENTROPY_BYTES: Final = ID_BYTES + SECRET_BYTES
"""Random bytes in a key: 40 bits identify it, 256 bits prove possession."""
CREDENTIAL: Final = re.compile(rb"(?:(?i:bearer) {1,8})?(fb-([a-z2-7]{8})-[a-z2-7]{52})")
"""What a client may send: a key, with or without `Bearer` before it. Bounded length, as gateways cache valid ones."""
LIKE_KEY: Final = re.compile(r"fb(?:-|%2d)([a-z2-7]{8})(?:-|%2d)[a-z2-7]{16,}", re.IGNORECASE | re.ASCII)
"""A key, or most of one, within a client's text."""
ALL_MODELS: Final = ("*",)
_NOBODY: Final = "0" * 64
"""Compared with when the id is unknown, so that it takes as long as for a known one."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's limits; None: unlimited. A minute is any 60 s, a day begins at midnight UTC."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    streams_max: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client of the cluster: its models, priorities and limits."""

    name: str
    models: tuple[str, ...] = ALL_MODELS
    """Names of models, or patterns with `*`."""
    band: Band = Band.DEFAULT
    band_max: Band = Band.DEFAULT
    """The highest priority that a request may ask for."""
    limits: Quota = Quota()

    def may_use(self, model: str) -> bool:
        """Whether the allow-list has the model."""
        return self.models == ALL_MODELS or any(fnmatchcase(model, pattern) for pattern in self.models)

    def band_of(self, asked: Band | None) -> Band:
        """The effective band of a request that asks for this band, or for none."""
        return self.band if asked is None else max(asked, self.band_max)


ANONYMOUS: Final = Tenant("anonymous", band_max=Band.INTERACTIVE)
"""The tenant of all requests while no keys are required."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The stored record of a key, never the key itself. Times in seconds since the epoch."""

    id: str
    tenant: str
    """The holder, for a key of the admin API."""
    digest: str
    created: float
    expires: float | None = None
    revoked: float | None = None
    role: str = ""
    """Set for keys of the admin API only: the holder's role."""
    replaced_by: str = ""
    """Id of the key that a rotation made of this one."""


class Denied(NamedTuple):
    """A rejection and its reason. `retry_after_s` 0: retrying does not help."""

    code: Code
    text: str
    retry_after_s: int = 0


class Granted(NamedTuple):
    """A valid key: its tenant, and when it expires (seconds since the epoch)."""

    tenant: Tenant
    expires: float
    key_id: str


_MISSING: Final = Denied(
    Code.UNAUTHORIZED, "No API key was given: send `Authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`."
)
_WRONG: Final = Denied(Code.UNAUTHORIZED, "The API key is not valid.")
_REVOKED: Final = Denied(Code.UNAUTHORIZED, "The API key was revoked.")
_EXPIRED: Final = Denied(Code.UNAUTHORIZED, "The API key has expired.")


class Directory:
    """Keys by id: either those of tenants or those of the admin API; neither kind is valid for the other.

    Built as a whole from a document; never changed.
    """

    __slots__ = ("_entries",)

    def __init__(self, tenants: Iterable[Tenant], records: Iterable[KeyRecord], *, admins: bool = False) -> None:
        known = {tenant.name: tenant for tenant in tenants}
        self._entries: Mapping[str, tuple[KeyRecord, Tenant | None]] = {
            record.id: (record, known.get(record.tenant)) for record in records if bool(record.role) is admins
        }

    def find(self, key_id: str) -> tuple[KeyRecord, Tenant | None] | None:
        """A key's record, and its tenant if that is still configured."""
        return self._entries.get(key_id)


def mint(
    tenant: str, entropy: bytes, now: float, expires: float | None = None, role: str = ""
) -> tuple[str, KeyRecord]:
    """A new key and its record. `entropy` is `ENTROPY_BYTES` from the system's secure source. Raises ValueError."""
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"a key is made of {ENTROPY_BYTES} random bytes, not {len(entropy)}")
    key_id, secret = _letters(entropy[:ID_BYTES]), _letters(entropy[ID_BYTES:])
    key = f"fb-{key_id}-{secret}"
    return key, KeyRecord(key_id, tenant, _digest(key.encode()), now, expires, role=role)


def authorise(directory: Directory, presented: bytes | None, now: float) -> Granted | Denied:
    """Verify a key. `presented` may begin with `Bearer `; `now` is seconds since the epoch.

    Only a caller with the complete key learns that it was revoked or has expired.
    """
    if not presented:
        return _MISSING
    found = CREDENTIAL.fullmatch(presented)
    if found is None:
        return _WRONG
    entry = directory.find(found[2].decode())
    kept = entry[0].digest if entry else _NOBODY
    if not hmac.compare_digest(_digest(found[1]).encode(), kept.encode()) or entry is None:
        return _WRONG
    record, tenant = entry
    if record.revoked is not None:
        return _REVOKED
    expires = float("inf") if record.expires is None else record.expires
    if now >= expires:
        return _EXPIRED
    if tenant is None:
        return Denied(Code.UNAUTHORIZED, f"The tenant `{record.tenant}` of this API key is no longer configured.")
    return Granted(tenant, expires, record.id)


def without_keys(text: str) -> str:
    """The text with the secret part of every key removed; only ids remain."""
    return LIKE_KEY.sub(r"fb-\1-…", text)


def contains_key(text: bytes) -> bool:
    """Whether there is a key, or most of one, in ASCII text."""
    return LIKE_KEY.search(text.decode("ascii")) is not None


def _letters(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
