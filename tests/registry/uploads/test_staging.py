"""Uploads: parts in any order, repeated or from two clients, give exactly the announced files or none."""

import errno
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.registry.manifest import File, Manifest, make_manifest
from forebay.registry.artifacts import describe
from forebay.registry.sources import SourceError
from forebay.registry.uploads import staging
from forebay.registry.uploads.staging import ABANDONED_S, Lacking, Staging

WEIGHTS = bytes(range(256)) * 4
FILES = {"weights.bin": WEIGHTS, "deep/er/copy.bin": WEIGHTS, "config.json": b"{}", "empty.txt": b""}


def quiet(stage: str, done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


def find_nothing(sha256: str) -> Path | None:
    return None


def file_of(path: str, content: bytes) -> File:
    return File(path, len(content), hashlib.sha256(content).hexdigest())


MANIFEST = make_manifest(file_of(path, content) for path, content in FILES.items())
BY_DIGEST = {hashlib.sha256(content).hexdigest(): content for content in FILES.values()}


@pytest.fixture
def staged(tmp_path: Path) -> Staging:
    return Staging(tmp_path / "uploads", find_nothing)


def send(to: Staging, manifest: Manifest, contents: dict[str, bytes] = BY_DIGEST) -> None:
    for each in to.lacking(manifest):
        have = each.have_bytes
        while have < each.size_bytes:
            part = contents[each.sha256][have : have + 300]
            have = to.put(each.sha256, each.size_bytes, have, part)


def contents_of(folder: Path) -> dict[str, bytes]:
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def uploads_left(tmp_path: Path) -> list[str]:
    return sorted(each.name for each in (tmp_path / "uploads").iterdir())


def test_upload_is_complete_and_removed_after_use(staged: Staging, tmp_path: Path) -> None:
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert [each.size_bytes for each in staged.lacking(MANIFEST)] == [2, len(WEIGHTS)], "each content once"
    assert staged.put(digest, len(WEIGHTS), 0, WEIGHTS[:10]) == 10
    assert Lacking(digest, len(WEIGHTS), 10) in staged.lacking(MANIFEST)

    send(staged, MANIFEST)
    assert staged.lacking(MANIFEST) == ()
    with staged.whole(MANIFEST, "my-model", quiet) as path:
        assert path.name == "my-model"
        assert contents_of(path) == FILES
        assert describe(path, quiet) == MANIFEST
        assert [os.stat(each).st_mode & 0o077 for each in (path, path.parent)] == [0, 0]
    assert uploads_left(tmp_path) == []


def test_single_file_upload_keeps_its_name(staged: Staging) -> None:
    manifest = make_manifest([file_of("m.gguf", WEIGHTS)], lone=True)
    send(staged, manifest)
    with staged.whole(manifest, "m.gguf", quiet) as path:
        assert (path.name, path.is_file(), describe(path, quiet)) == ("m.gguf", True, manifest)


def test_contents_already_in_the_registry_are_not_uploaded(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(WEIGHTS)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    staged = Staging(tmp_path / "uploads", lambda sha256: kept if sha256 == digest else None)
    assert [each.size_bytes for each in staged.lacking(MANIFEST)] == [2]
    send(staged, MANIFEST)
    with staged.whole(MANIFEST, "m", quiet) as path:
        assert contents_of(path) == FILES
    assert kept.read_bytes() == WEIGHTS


def test_upload_is_kept_when_its_use_fails(staged: Staging, tmp_path: Path) -> None:
    send(staged, MANIFEST)
    with pytest.raises(LookupError), staged.whole(MANIFEST, "m", quiet):
        raise LookupError
    assert staged.lacking(MANIFEST) == ()
    assert not [name for name in uploads_left(tmp_path) if name.startswith(".tree-")]


@pytest.mark.parametrize("path", ["weights.bin", "config.json"])
def test_only_contents_with_a_wrong_digest_are_removed(staged: Staging, path: str) -> None:
    digest = hashlib.sha256(FILES[path]).hexdigest()
    lie = bytes(len(FILES[path]))
    send(staged, MANIFEST, {**BY_DIGEST, digest: lie})
    with pytest.raises(SourceError, match=f"{path}: its SHA-256 is {hashlib.sha256(lie).hexdigest()}, not {digest}"):
        staged.whole(MANIFEST, "m", quiet).__enter__()
    assert [(each.sha256, each.have_bytes) for each in staged.lacking(MANIFEST)] == [(digest, 0)]
    send(staged, MANIFEST)
    with staged.whole(MANIFEST, "m", quiet) as found:
        assert contents_of(found) == FILES


def test_wrong_announced_size_does_not_block_the_upload(staged: Staging) -> None:
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    lies = make_manifest([File("weights.bin", 4, digest)])
    assert staged.put(digest, 4, 0, WEIGHTS[:4]) == 4
    with pytest.raises(SourceError, match="its SHA-256 is"):
        staged.whole(lies, "m", quiet).__enter__()
    empty = make_manifest([File("weights.bin", 0, digest)])
    assert staged.lacking(empty) == ()
    with pytest.raises(SourceError, match="its SHA-256 is"):
        staged.whole(empty, "m", quiet).__enter__()
    send(staged, MANIFEST)
    with staged.whole(MANIFEST, "m", quiet):
        pass


def test_incomplete_upload_is_rejected_and_kept(staged: Staging) -> None:
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    staged.put(digest, len(WEIGHTS), 0, WEIGHTS[:10])
    with pytest.raises(SourceError, match="is incomplete; upload it again"):
        staged.whole(MANIFEST, "m", quiet).__enter__()
    assert Lacking(digest, len(WEIGHTS), 10) in staged.lacking(MANIFEST)


def test_part_beyond_the_end_is_rejected(staged: Staging) -> None:
    with pytest.raises(SourceError, match="has 4 bytes, but this part ends at 5"):
        staged.put("a" * 64, 4, 3, b"xy")
    assert staged.put("a" * 64, 4, 0, b"") == 0


class _Put(NamedTuple):
    offset: int
    length: int


@given(st.lists(st.builds(_Put, st.integers(0, 60), st.integers(0, 60)), max_size=20))
def test_staged_file_is_always_a_prefix(puts: list[_Put]) -> None:
    content, digest = WEIGHTS[:60], hashlib.sha256(WEIGHTS[:60]).hexdigest()
    folder = Path(tempfile.mkdtemp())
    staged, have = Staging(folder, find_nothing), 0
    for offset, length in puts:
        part = content[offset : offset + length]
        expected = max(have, offset + len(part)) if offset <= have else have
        have = staged.put(digest, len(content), offset, part)
        assert have == expected
        assert (folder / f"{digest}.60").read_bytes() == content[:have]
    shutil.rmtree(folder)


def test_concurrent_uploads_of_one_file_cooperate(staged: Staging) -> None:
    content = os.urandom(200_000)
    manifest = make_manifest([file_of("a.bin", content)])
    contents = {manifest.files[0].sha256: content}
    threads = [threading.Thread(target=send, args=(staged, manifest, contents)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with staged.whole(manifest, "m", quiet) as first, staged.whole(manifest, "m", quiet) as second:
        assert contents_of(first) == contents_of(second) == {"a.bin": content}


def test_sweep_removes_only_abandoned_uploads(
    staged: Staging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged.put("a" * 64, 9, 0, b"old")
    (tmp_path / "uploads" / ".tree-dead").mkdir()
    now = staging.wall_s()
    monkeypatch.setattr(staging, "wall_s", lambda: now + ABANDONED_S - 60)
    assert staged.sweep() == 0
    for name in uploads_left(tmp_path):
        os.utime(tmp_path / "uploads" / name, (0, 0))
    staged.put("b" * 64, 9, 0, b"young")
    assert staged.sweep() == 3
    assert uploads_left(tmp_path) == [f"{'b' * 64}.9"]
    assert Staging(tmp_path / "none", find_nothing).sweep() == 0


def test_lacking_refreshes_the_sweep_time(staged: Staging, tmp_path: Path) -> None:
    send(staged, MANIFEST)
    for name in uploads_left(tmp_path):
        os.utime(tmp_path / "uploads" / name, (0, 0))
    assert [each.have_bytes for each in staged.lacking(MANIFEST)] == [0, 0], "that was too late"
    send(staged, MANIFEST)
    for name in uploads_left(tmp_path):
        os.utime(tmp_path / "uploads" / name, (staging.wall_s() - ABANDONED_S + 60,) * 2)
    staged.lacking(MANIFEST)
    assert all(staging.wall_s() - each.stat().st_mtime < 60 for each in (tmp_path / "uploads").iterdir())


@pytest.fixture
def limited_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    usage = shutil.disk_usage("/")

    def free(count: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=count))

    return free


def test_full_disk_is_reported_before_uploading(staged: Staging, limited_disk: Callable[[int], None]) -> None:
    limited_disk(staging.SPARE_BYTES + len(WEIGHTS))
    with pytest.raises(SourceError, match="is full: free some space"):
        staged.lacking(MANIFEST)
    limited_disk(staging.SPARE_BYTES + len(WEIGHTS) + 2)
    assert len(staged.lacking(MANIFEST)) == 2
    limited_disk(staging.SPARE_BYTES)
    with pytest.raises(SourceError, match="is full: free some space"):
        staged.put("a" * 64, 9, 0, b"x")


def test_disk_full_during_upload_keeps_what_was_written(tmp_path: Path) -> None:
    def full(folder: Path, size: int) -> None:
        folder.mkdir(exist_ok=True)
        if size > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    staged = Staging(tmp_path / "uploads", find_nothing, full)
    assert staged.put("a" * 64, 9, 0, b"xy") == 2
    with pytest.raises(SourceError, match="is full: free some space; the upload is kept"):
        staged.put("a" * 64, 9, 2, b"abc")
    assert staged.put("a" * 64, 9, 0, b"") == 2


def test_planted_symlink_is_not_followed(staged: Staging, tmp_path: Path) -> None:
    staged.put("b" * 64, 4, 0, b"x")
    (tmp_path / "secret").write_bytes(b"")
    (tmp_path / "uploads" / f"{'a' * 64}.4").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match="symbolic links"):
        staged.put("a" * 64, 4, 0, b"evil")
    assert (tmp_path / "secret").read_bytes() == b""


def test_overlong_file_name_is_rejected(staged: Staging) -> None:
    manifest = make_manifest([file_of("x" * 300, b"{}")])
    send(staged, manifest)
    with pytest.raises(SourceError, match="File name too long"):
        staged.whole(manifest, "m", quiet).__enter__()
    assert staged.lacking(manifest) == ()


def test_uncreatable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "uploads").write_bytes(b"")
    for work in (
        lambda staged: staged.lacking(MANIFEST),
        lambda staged: staged.put("a" * 64, 4, 0, b"x"),
        lambda staged: staged.whole(MANIFEST, "m", quiet).__enter__(),
    ):
        with pytest.raises(SourceError, match="uploads"):
            work(Staging(tmp_path / "uploads", find_nothing))
