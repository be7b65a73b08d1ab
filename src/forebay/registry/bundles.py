"""Signature files as written by `model_signing sign key` of OpenSSF: Sigstore bundles with a DSSE envelope."""

import base64
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from forebay.core.registry.statements import PAYLOAD_TYPE
from forebay.registry.sources import SourceError
from forebay.wire.documents import UNREADABLE

BUNDLE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Enough for some 20,000 files."""
MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"


class Bundle(NamedTuple):
    """A statement and its signature, both base64; the signing key is still to be determined."""

    statement: str
    signature: str


class _Signature(msgspec.Struct):
    sig: str


class _Envelope(msgspec.Struct, rename="camel"):
    payload: str
    payload_type: str
    signatures: list[_Signature]


class _Material(msgspec.Struct, rename="camel"):
    public_key: dict[str, object] | None = None


class _Document(msgspec.Struct, rename="camel"):
    media_type: str
    verification_material: _Material
    dsse_envelope: _Envelope


def bundle_bytes(path: Path) -> bytes:
    """The content of a file; a longer one than allowed is no valid signature. Raises `SourceError`."""
    try:
        with path.open("rb") as file:
            return file.read(BUNDLE_BYTES_MAX + 1)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from error


def read_bundle(content: bytes, name: str) -> Bundle:
    """Parse the signature in a file's content; `name` is for messages. Raises `SourceError`."""
    try:
        document = msgspec.json.decode(content, type=_Document)
        envelope = document.dsse_envelope
        payload = base64.b64decode(envelope.payload, validate=True)
        signature = base64.b64decode(envelope.signatures[0].sig, validate=True)
    except (*UNREADABLE, ValueError, IndexError) as error:
        raise SourceError(f"{name}: not a signature made by `model_signing sign key` ({error})") from error
    if document.media_type != MEDIA_TYPE or envelope.payload_type != PAYLOAD_TYPE:
        raise SourceError(f"{name}: holds a {document.media_type} with a {envelope.payload_type}: not supported")
    if document.verification_material.public_key is None or len(envelope.signatures) > 1:
        raise SourceError(
            f"{name}: was not signed with a key alone; only signatures made by `model_signing sign key` are accepted"
        )
    return Bundle(base64.b64encode(payload).decode(), base64.b64encode(signature).decode())
