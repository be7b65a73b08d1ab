"""Encryption at rest: data round-trips, and tampered data is never returned."""

import base64
import io
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.registry import sealing
from forebay.registry.sealing import KEY_BYTES, KeyCommand, KeyFile, seal, unseal
from forebay.registry.sources import SourceError

KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "CHUNK_BYTES", 32)


def sealed(data: bytes, number: int = 0, key: bytes = KEY) -> bytes:
    out = io.BytesIO()
    seal([data[at : at + 7] for at in range(0, len(data), 7)], out, key, number)
    return out.getvalue()


def opened(data: bytes, number: int = 0, key: bytes = KEY) -> bytes:
    return b"".join(unseal(io.BytesIO(data), key, number))


@given(st.binary(max_size=200))
def test_seal_and_unseal_round_trip(data: bytes) -> None:
    made = sealed(data)
    assert opened(made) == data
    assert len(data) < 8 or data not in made


def test_changed_truncated_and_reordered_data_is_detected() -> None:
    data = bytes(range(100))
    good = sealed(data)
    for place in range(len(good)):
        with pytest.raises(SourceError, match=f"chunk {place // 48}"):
            opened(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(SourceError):
            opened(good[:place])
    for bad in (good[48:96] + good[:48] + good[96:], good[:48] + good[:48] + good[96:], good + good[-20:], good[48:]):
        with pytest.raises(SourceError):
            opened(bad)
    with pytest.raises(SourceError):
        opened(good, number=1)
    with pytest.raises(SourceError):
        opened(good, key=bytes(32))


def test_key_file_unwraps_only_its_own_keys(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    for path in (ours, other):
        path.write_bytes(base64.b64encode(os.urandom(KEY_BYTES)) + b"\n")
    wrapped = KeyFile(ours).wrap(KEY)
    assert KeyFile(ours).unwrap(wrapped) == KEY
    assert KeyFile(ours).wrap(KEY) != wrapped
    with pytest.raises(SourceError, match="is not the key"):
        KeyFile(other).unwrap(wrapped)
    for place in range(0, len(wrapped) - 2, 5):
        bad = wrapped[:place] + ("A" if wrapped[place] != "A" else "B") + wrapped[place + 1 :]
        with pytest.raises(SourceError, match="is not the key"):
            KeyFile(ours).unwrap(bad)
    (tmp_path / "short").write_text("YWJj")
    with pytest.raises(SourceError, match=r"not a key of 32 bytes.*openssl rand"):
        KeyFile(tmp_path / "short").wrap(KEY)
    with pytest.raises(SourceError, match="cannot be read"):
        KeyFile(tmp_path / "none").wrap(KEY)


def test_key_command_failures_are_reported_without_the_key(tmp_path: Path) -> None:
    kms = tmp_path / "kms"
    kms.write_text('#!/bin/sh\n[ "$1" = wrap ] && exec rev\n[ "$1" = unwrap ] && exec rev\n')
    kms.chmod(kms.stat().st_mode | stat.S_IXUSR)
    command = KeyCommand([str(kms)])
    assert command.unwrap(command.wrap(KEY)) == KEY
    with pytest.raises(SourceError, match="did not return a key"):
        command.unwrap("abc")
    kms.write_text("#!/bin/sh\necho denied >&2\nexit 3\n")
    with pytest.raises(SourceError, match="ended with 3: denied") as caught:
        command.wrap(KEY)
    assert base64.b64encode(KEY).decode() not in str(caught.value)
    with pytest.raises(SourceError, match="No such file"):
        KeyCommand(["/nowhere/kms"]).wrap(KEY)
