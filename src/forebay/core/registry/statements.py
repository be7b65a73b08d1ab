"""Statements of OpenSSF Model Signing: an in-toto statement that lists every file with its digest.

Sources: `docs/model_signing_format.md` and `_signing/signing.py` of github.com/sigstore/model-transparency for the
statement, protocol.md of github.com/secure-systems-lab/dsse for the signed bytes.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

import msgspec

from forebay.core.registry.manifest import Manifest

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://model_signing/signature/v1.0"
LONE: Final = "."
"""The name of the file in a single-file model."""
BROKEN: Final = (msgspec.DecodeError, UnicodeError, RecursionError)


class _Resource(msgspec.Struct):
    name: str
    algorithm: str
    digest: str


class _Serialization(msgspec.Struct):
    method: str
    hash_type: str
    ignore_paths: list[str] = []


class _Predicate(msgspec.Struct):
    serialization: _Serialization
    resources: list[_Resource]


class _Statement(msgspec.Struct):
    type: str = msgspec.field(name="_type")
    kind: str = msgspec.field(name="predicateType")
    predicate: _Predicate


_statement = msgspec.json.Decoder(_Statement).decode


def signed_bytes(statement: bytes) -> bytes:
    """The bytes that are signed: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(statement), statement)


def mismatch(statement: bytes, manifest: Manifest) -> str:
    """Why a statement does not cover exactly these files; empty: it does.

    Files below the ignored paths of the statement, such as the signature itself, may exist or not.
    """
    try:
        found = _statement(statement)
    except BROKEN:
        return "it is not a statement of version 1.0 of the format"
    if (found.type, found.kind) != (STATEMENT, PREDICATE):
        return f"it is a {found.kind}, not a {PREDICATE}"
    how, resources = found.predicate.serialization, found.predicate.resources
    if how.method != "files" or {how.hash_type, *(each.algorithm for each in resources)} != {"sha256"}:
        return f"it is about {how.method} with {how.hash_type}; only whole files with sha256 can be compared"
    signed = {each.name: each.digest for each in resources}
    if len(signed) < len(resources):
        return "it lists a file twice"
    if manifest.lone and LONE in signed:
        signed[manifest.files[0].path] = signed.pop(LONE)
    return next(_differences(manifest, signed, {PurePosixPath(path) for path in how.ignore_paths}), "")


def _differences(manifest: Manifest, signed: dict[str, str], ignored: set[PurePosixPath]) -> Iterator[str]:
    for file in manifest.files:
        path = PurePosixPath(file.path)
        if file.path in signed:
            if signed.pop(file.path) != file.sha256:
                yield f"{file.path}: the signed content differs"
        elif ignored.isdisjoint((path, *path.parents)):
            yield f"{file.path}: it was not signed"
    if signed:
        yield f"{min(signed)}: it was signed, but is not part of the artifact"
