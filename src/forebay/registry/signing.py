"""Ed25519 signatures: the registry signs approval steps, publishers sign artifacts.

Publishers may also use elliptic curve keys, with which OpenSSF's `model_signing` signs.
"""

import base64
import os
from pathlib import Path
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
    load_pem_public_key,
)

from forebay.registry.sources import SourceError

KEY_MODE: Final = 0o600
KEY_BYTES_MAX: Final = 16_384
RAW_BYTES: Final = 32
"""Of a public Ed25519 key."""
HASHES: Final = {"secp256r1": hashes.SHA256(), "secp384r1": hashes.SHA384(), "secp521r1": hashes.SHA512()}
"""The hash for each curve, as paired by Sigstore."""
MADE_WITH: Final = "one is made with `openssl genpkey -algorithm ed25519 -out FILE`"


class Proof(NamedTuple):
    """A public key, and a signature by the holder of its private key; both base64."""

    public: str
    signature: str


class Signer:
    """Signs with a private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public(self) -> str:
        """The public key, base64: the signer's identity."""
        return _name(self._key.public_key())

    def sign(self, message: bytes) -> str:
        """The signature, base64."""
        return base64.b64encode(self._key.sign(message)).decode()

    def prove(self, message: bytes) -> Proof:
        """The signature, with the public key that verifies it."""
        return Proof(self.public, self.sign(message))


def is_signed(message: bytes, signature: str, public: str) -> bool:
    """Whether the holder of the public key signed the message. Only canonical base64 is accepted."""
    try:
        name, proof = exactly(public), exactly(signature)
        if len(name) == RAW_BYTES:
            Ed25519PublicKey.from_public_bytes(name).verify(proof, message)
        else:
            key = load_der_public_key(name)
            if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in HASHES:
                return False
            key.verify(proof, message, ec.ECDSA(HASHES[key.curve.name]))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def exactly(text: str) -> bytes:
    """Decode base64. Raises `ValueError` also for non-canonical encodings."""
    found = base64.b64decode(text, validate=True)
    if base64.b64encode(found).decode() != text:
        raise ValueError("not the base64 that was written")
    return found


def read_signer(path: Path) -> Signer:
    """The private key in a PEM file. Raises `SourceError`."""
    try:
        key = load_pem_private_key(_content(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SourceError(f"{path}: not a private Ed25519 key without a password; {MADE_WITH}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SourceError(f"{path}: unsupported type of private key; {MADE_WITH}")
    return Signer(key)


def read_public(path: Path) -> str:
    """The public key in a PEM file, base64: Ed25519, or of a curve in `HASHES`. Raises `SourceError`."""
    try:
        key = load_pem_public_key(_content(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SourceError(
            f"{path}: not a public key; `openssl pkey -in FILE -pubout` prints that of a key"
        ) from error
    if isinstance(key, Ed25519PublicKey):
        return _name(key)
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in HASHES:
        return base64.b64encode(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode()
    raise SourceError(f"{path}: unsupported type of public key; supported are Ed25519, P-256, P-384 and P-521")


def own_signer(path: Path) -> Signer:
    """The registry's own key, created on first use, readable by its owner only. Raises `SourceError`."""
    if not path.exists():
        pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, KEY_MODE)
            with os.fdopen(file, "wb") as stream:
                stream.write(pem)
                stream.flush()
                os.fsync(file)
            try:
                os.link(draft, path)
            except FileExistsError:  # another process created one first, which may be in use
                pass
            finally:
                draft.unlink()
        except OSError as error:
            raise SourceError(f"{path}: the key of the registry cannot be made ({error.strerror})") from error
    return read_signer(path)


def _name(key: Ed25519PublicKey) -> str:
    return base64.b64encode(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(KEY_BYTES_MAX)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from error
