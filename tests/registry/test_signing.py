"""Keys and signatures: valid ones are recognised, everything else is rejected."""

import base64
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.registry.signing import is_signed, own_signer, read_public, read_signer
from forebay.registry.sources import SourceError


def test_key_is_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "registry.key"
    first = own_signer(path)
    assert own_signer(path).public == first.public
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["registry.key"]


def test_signature_is_valid_only_for_its_message_and_key(tmp_path: Path) -> None:
    ours, other = own_signer(tmp_path / "a"), own_signer(tmp_path / "b")
    signature = ours.sign(b"message")
    assert is_signed(b"message", signature, ours.public)
    assert not is_signed(b"messagf", signature, ours.public)
    assert not is_signed(b"message", signature, other.public)
    assert not is_signed(b"message", other.sign(b"message"), ours.public)


def test_non_canonical_base64_signature_is_rejected(tmp_path: Path) -> None:
    ours = own_signer(tmp_path / "a")
    signature = ours.sign(b"message")
    last = signature[-3]
    assert signature.endswith("==")
    other = signature[:-3] + chr(ord(last) + 1) + "=="
    assert base64.b64decode(other) == base64.b64decode(signature)
    assert not is_signed(b"message", other, ours.public)


@given(st.text(max_size=100), st.text(max_size=60))
def test_arbitrary_text_is_no_valid_signature(signature: str, public: str) -> None:
    assert not is_signed(b"message", signature, public)


def test_keys_of_openssl_are_read(tmp_path: Path) -> None:
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    assert read_signer(private).public == read_public(public)
    with pytest.raises(SourceError, match="not a public key"):
        read_public(private)
    with pytest.raises(SourceError, match=r"not a private Ed25519 key.*openssl genpkey"):
        read_signer(public)


def test_unsupported_and_unreadable_keys_are_reported(tmp_path: Path) -> None:
    rsa, public = tmp_path / "rsa.pem", tmp_path / "rsa.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "x25519", "-out", rsa], check=True)
    subprocess.run(["openssl", "pkey", "-in", rsa, "-pubout", "-out", public], check=True)
    with pytest.raises(SourceError, match="unsupported type of"):
        read_signer(rsa)
    with pytest.raises(SourceError, match="unsupported type of"):
        read_public(public)
    with pytest.raises(SourceError, match="cannot be read"):
        read_signer(tmp_path / "none")
    with pytest.raises(SourceError, match="cannot be made"):
        own_signer(Path("/proc/none/key"))
