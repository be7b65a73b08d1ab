"""Uploads to an encrypting registry: files stay in memory until sealed, and are never on disk in plaintext."""

import base64
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.registry.test_catalogue import ANN, WHAT, make
from tests.registry.uploads.test_staging import FILES, MANIFEST, contents_of, quiet, send

from forebay.core.registry.approval import ApprovalRules
from forebay.core.registry.manifest import File, make_manifest
from forebay.registry.catalogue import Registry
from forebay.registry.sealing import KeyFile
from forebay.registry.sources import SourceError
from forebay.registry.vault import Vault


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder / "cluster"
    shutil.rmtree(folder)


@pytest.fixture
def registry(tmp_path: Path, memory: Path) -> Iterator[Registry]:
    (tmp_path / "wrap.key").write_bytes(base64.b64encode(os.urandom(32)))
    vault = Vault(tmp_path / "registry", KeyFile(tmp_path / "wrap.key"), memory)
    made = make(tmp_path, ApprovalRules(), vault=vault, encrypts=True)
    yield made
    made._store.close()


def test_uploaded_files_are_sealed_and_never_in_plaintext(registry: Registry, tmp_path: Path, memory: Path) -> None:
    digest = {file.path: file.sha256 for file in MANIFEST.files}["weights.bin"]
    registry.uploads.put(digest, len(FILES["weights.bin"]), 0, FILES["weights.bin"][:10])
    registry.sweep()
    assert [each.name for each in (memory / "uploads").iterdir()] == [f"{digest}.{len(FILES['weights.bin'])}"]
    send(registry.uploads, MANIFEST)
    with registry.sent(MANIFEST, "m", quiet) as path:
        assert contents_of(path) == FILES
        listed = registry.add(WHAT, path, ANN, quiet)
    assert list((memory / "uploads").iterdir()) == []
    on_disk = [each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()]
    assert not [content for content in on_disk if FILES["weights.bin"][:64] in content]

    assert registry.lacking(MANIFEST) == (), "it is there, sealed"
    with registry.sent(MANIFEST, "m", quiet) as again:
        assert registry.add(WHAT, again, ANN, quiet) == listed
    _, opened = registry.open("chat", listed.revision.id, quiet)
    assert contents_of(opened) == FILES


def test_disk_backed_or_full_memory_rejects_uploads(tmp_path: Path, registry: Registry) -> None:
    on_disk = Vault(tmp_path / "registry", KeyFile(tmp_path / "wrap.key"), tmp_path / "memory" / "cluster")
    other = make(tmp_path, ApprovalRules(), vault=on_disk, encrypts=True)
    with pytest.raises(SourceError, match="is on a disk"):
        other.lacking(MANIFEST)
    other._store.close()
    with pytest.raises(SourceError, match="has room for"):
        registry.lacking(make_manifest([File("a", 2**50, "0" * 64)]))
