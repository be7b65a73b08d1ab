"""OpenSSF Model Signing bundles: those of its own tool are accepted, and changed ones never."""

import base64
import json
import sqlite3
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.registry.test_catalogue import ANN, BOB, WHAT, make, quiet

from forebay.core.registry.approval import ApprovalRules
from forebay.core.registry.statements import PREDICATE, STATEMENT, signed_bytes
from forebay.registry.bundles import MEDIA_TYPE, Bundle, bundle_bytes, read_bundle
from forebay.registry.catalogue import Registry
from forebay.registry.proved import RegistryError, Tampered
from forebay.registry.signing import is_signed, read_public
from forebay.registry.sources import SourceError

HERE = Path(__file__).parent
MODEL = HERE / "model"
"""Signed with `model_signing sign key` 1.1.1; its keys were thrown away."""
CURVES = ("p256", "p384", "p521")
Change = Callable[[dict[str, Any]], None]
KEY = ec.generate_private_key(ec.SECP256R1())


def public_file(folder: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey = KEY) -> Path:
    path = folder / "key.pub"
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


def bundle_file(folder: Path, change: Change = lambda document: None) -> Path:
    """A signature of the model as `model_signing` would make it, with a key of this test."""
    files = sorted(each for each in MODEL.rglob("*") if each.is_file())
    resources = [
        {
            "name": each.relative_to(MODEL).as_posix(),
            "algorithm": "sha256",
            "digest": sha256(each.read_bytes()).hexdigest(),
        }
        for each in files
    ]
    predicate = {"serialization": {"method": "files", "hash_type": "sha256"}, "resources": resources}
    statement = json.dumps({"_type": STATEMENT, "predicateType": PREDICATE, "predicate": predicate}).encode()
    proof = KEY.sign(signed_bytes(statement), ec.ECDSA(hashes.SHA256()))
    document = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": "a"}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(statement).decode(),
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [{"sig": base64.b64encode(proof).decode(), "keyid": ""}],
        },
    }
    change(document)
    path = folder / "model.sig"
    path.write_text(json.dumps(document))
    return path


def load_bundle(path: Path) -> Bundle:
    return read_bundle(bundle_bytes(path), str(path))


def registered(folder: Path, public: Path, model: Path = MODEL) -> tuple[Registry, str]:
    registry = make(folder, ApprovalRules(), (read_public(public),))
    return registry, registry.add(WHAT, model, ANN, quiet).revision.id


@pytest.mark.parametrize("curve", CURVES)
def test_bundle_of_the_openssf_tool_is_accepted_for_a_publisher_key(tmp_path: Path, curve: str) -> None:
    public = HERE / f"{curve}.pub"
    registry, id = registered(tmp_path, public)
    with pytest.raises(RegistryError, match="has no signature"):
        registry.open("chat", id, quiet)
    bundle = load_bundle(HERE / f"{curve}.sig")
    assert registry.attach("chat", id, bundle, BOB) == registry.attach("chat", id, bundle, BOB)
    assert registry.open("chat", id, quiet)[0].signed_by == (read_public(public),)
    assert registry.verify(quiet) == []


def test_bundle_of_another_key_or_other_files_is_rejected(tmp_path: Path) -> None:
    registry, id = registered(tmp_path, HERE / "p256.pub")
    with pytest.raises(RegistryError, match=r"not made by a key in `registry\.publishers`"):
        registry.attach("chat", id, load_bundle(HERE / "p384.sig"), BOB)
    other = tmp_path / "other"
    other.mkdir()
    (other / "weights.bin").write_bytes(b"others")
    wrong = registry.add(WHAT, other, ANN, quiet).revision.id
    with pytest.raises(
        RegistryError, match=r"not a signature of this artifact: weights\.bin: the signed content differs"
    ):
        registry.attach("chat", wrong, load_bundle(HERE / "p256.sig"), BOB)


@pytest.mark.slow
@pytest.mark.parametrize("curve", [*CURVES, "ours"])
def test_every_changed_byte_of_a_stored_signature_is_detected(tmp_path: Path, curve: str) -> None:
    public = public_file(tmp_path) if curve == "ours" else HERE / f"{curve}.pub"
    registry, id = registered(tmp_path, public)
    registry.attach("chat", id, load_bundle(bundle_file(tmp_path) if curve == "ours" else HERE / f"{curve}.sig"), BOB)
    with sqlite3.connect(tmp_path / "store.db", isolation_level=None) as database:
        (text,) = database.execute("SELECT signatures FROM artifacts").fetchone()
        for field in ("public", "signature", "statement"):
            good = json.loads(text)[0][field]
            for place in range(0, len(good), 1 if len(good) < 200 else 61):
                bad = good[:place] + ("A" if good[place] != "A" else "B") + good[place + 1 :]
                database.execute("UPDATE artifacts SET signatures = ?", (text.replace(good, bad),))
                with pytest.raises(Tampered, match="a signature was changed"):
                    registry.show("chat", id)
        database.execute("UPDATE artifacts SET signatures = ?", (text.replace('"statement"', '"statemen"'),))
        with pytest.raises(Tampered, match="a signature was changed"):
            registry.show("chat", id)


@pytest.mark.slow
def test_changed_bundle_file_is_rejected_or_equivalent(tmp_path: Path) -> None:
    """Wherever it was: what is not read may differ, but whatever is read is signed or known."""
    registry, id = registered(tmp_path, HERE / "p256.pub")
    good = (HERE / "p256.sig").read_bytes()
    path = tmp_path / "model.sig"
    taken = []
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            bundle = load_bundle(path)
        except SourceError:
            continue
        if bundle == load_bundle(HERE / "p256.sig"):
            taken.append(place)
            continue
        with pytest.raises(RegistryError):
            registry.attach("chat", id, bundle, BOB)
    assert len(taken) < 40


def without_key(document: dict[str, Any]) -> None:
    document["verificationMaterial"] = {"certificate": {"rawBytes": ""}}


def twice(document: dict[str, Any]) -> None:
    document["dsseEnvelope"]["signatures"] *= 2


def no_signatures(document: dict[str, Any]) -> None:
    document["dsseEnvelope"]["signatures"] = []


def other_media(document: dict[str, Any]) -> None:
    document["mediaType"] = "text/plain"


def other_payload(document: dict[str, Any]) -> None:
    document["dsseEnvelope"]["payloadType"] = "text/plain"


def no_base64(document: dict[str, Any]) -> None:
    document["dsseEnvelope"]["payload"] = "é"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without_key, "was not signed with a key alone"),
        (twice, "was not signed with a key alone"),
        (no_signatures, "not a signature made by"),
        (other_media, "holds a text/plain"),
        (other_payload, "with a text/plain"),
        (no_base64, "not a signature made by"),
    ],
)
def test_unsupported_bundle_is_described_in_the_error(tmp_path: Path, change: Change, why: str) -> None:
    with pytest.raises(SourceError, match=why):
        load_bundle(bundle_file(tmp_path, change))


def test_file_that_is_no_bundle_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        load_bundle(tmp_path / "none")
    (tmp_path / "key").write_text("-----BEGIN")
    with pytest.raises(SourceError, match="not a signature made by"):
        load_bundle(tmp_path / "key")


def test_ed25519_key_can_sign_a_statement(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    registry, id = registered(tmp_path, public_file(tmp_path, key))
    statement = load_bundle(bundle_file(tmp_path)).statement
    proof = base64.b64encode(key.sign(signed_bytes(base64.b64decode(statement)))).decode()
    registry.attach("chat", id, Bundle(statement, proof), BOB)
    registry.open("chat", id, quiet)


def test_keys_on_unsupported_curves_are_rejected(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256K1())
    with pytest.raises(SourceError, match="unsupported type of public key; supported are Ed25519, P-256"):
        read_public(public_file(tmp_path, key))
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    proof = key.sign(b"x", ec.ECDSA(hashes.SHA256()))
    assert not is_signed(b"x", base64.b64encode(proof).decode(), base64.b64encode(der).decode())
