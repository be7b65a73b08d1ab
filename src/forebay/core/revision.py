"""Content-derived identifiers: the revision of a model, the digest of a unit's specification."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from forebay.core.model import GatewaySpec, WorkerSpec

REVISION_ID = re.compile("r-[0-9a-f]{8}")
_OWN = ("generation", "endpoint_path")
"""Fields of a specification that differ between starts of the same unit."""


def revision_id(artifact_digest: str, engine: str, settings: Mapping[str, int | float | str | bool]) -> str:
    """The name of a revision; equal content gives equal names."""
    return f"r-{_digest([artifact_digest, engine, dict(settings)])[:8]}"


def spec_digest(spec: WorkerSpec | GatewaySpec, version: str) -> str:
    """The digest changes if a unit must be replaced to match `spec` under this version of Forebay."""
    fields = {key: value for key, value in dataclasses.asdict(spec).items() if key not in _OWN}
    if fields.get("tenancy"):
        del fields["tenancy"]["tenants"]  # a running gateway learns of other tenants from the snapshot
    return _digest([version, fields])[:16]


def placed_digest(digest: str, where: Sequence[object]) -> str:
    """The digest of a specification together with its placement; `where` is plain data."""
    return _digest([digest, where])[:16]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
