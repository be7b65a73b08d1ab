"""The API key file: private, never corrupted, and changed by one writer at a time."""

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.core.tenancy import KeyRecord
from forebay.registry import keys
from forebay.registry.keys import KeyFileError, Keys, change_keys, read_keys

ONE = KeyRecord("aaaaaaaa", "team", "0" * 64, 100.0, expires=200.0)
TWO = KeyRecord("bbbbbbbb", "team", "1" * 64, 101.0)


def add(path: Path, *records: KeyRecord) -> None:
    change_keys(path, lambda before: ((*before, *records), None))


def test_missing_file_has_no_keys(tmp_path: Path) -> None:
    assert read_keys(tmp_path / "keys.json") == ()


def test_keys_keep_their_order_in_a_file_readable_by_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "run" / "keys.json"
    add(path, ONE)
    add(path, TWO)

    assert read_keys(path) == (ONE, TWO)
    assert [p.name for p in sorted(path.parent.iterdir())] == ["keys.json", "keys.json.lock"]
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()} == {0o600}


def test_change_returns_a_value_and_its_exception_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, ONE, TWO)
    assert change_keys(path, lambda before: (before[1:], len(before))) == 2

    def broken(before: Keys) -> tuple[Keys, None]:
        raise LookupError("no such key")

    with pytest.raises(LookupError):
        change_keys(path, broken)
    assert read_keys(path) == (TWO,)


def test_concurrent_changes_are_serialised(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    records = [replace(ONE, id=f"{n:08}") for n in range(40)]
    writers = [threading.Thread(target=add, args=(path, record)) for record in records]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert sorted(read_keys(path), key=lambda record: record.id) == records


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"keys": 5}',
        b'{"keys": [{"id": "a"}]}',
        b'{"keys": [], "version": 2}',
        b'{"keys": [], "kyes": []}',
    ],
)
def test_corrupt_file_is_rejected_and_left_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)

    with pytest.raises(KeyFileError, match=r"keys\.json: not a file of API keys .* restore a copy"):
        read_keys(path)
    with pytest.raises(KeyFileError):
        add(path, ONE)
    assert path.read_bytes() == content


def test_duplicate_ids_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, ONE, TWO, replace(TWO, id=ONE.id))

    with pytest.raises(KeyFileError, match="more than one key has the id aaaaaaaa"):
        read_keys(path)


def test_number_of_keys_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEYS_MAX", 1)
    add(tmp_path / "keys.json", ONE)

    with pytest.raises(KeyFileError, match="has 1 keys"):
        add(tmp_path / "keys.json", TWO)


def test_unreadable_or_unwritable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys.json").mkdir()
    (tmp_path / "file").write_text("")

    with pytest.raises(KeyFileError, match=r"keys\.json: cannot be read \(Is a directory\)"):
        read_keys(tmp_path / "keys.json")
    with pytest.raises(KeyFileError, match=r"cannot be written \((Not a directory|File exists)\)"):
        add(tmp_path / "file" / "keys.json", ONE)


def test_full_disk_keeps_the_old_file_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    add(path, ONE)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyFileError, match="No space left"):
        add(path, TWO)
    assert read_keys(path) == (ONE,)
    assert not path.with_name("keys.json.new").exists()


def test_leftover_world_readable_draft_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    draft = path.with_name("keys.json.new")
    draft.write_text("left by a crash" * 100)
    draft.chmod(0o666)
    add(path, ONE)

    assert read_keys(path) == (ONE,)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_change_syncs_the_file_and_then_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[bool, bool]] = []
    path = tmp_path / "keys.json"
    fsync = os.fsync

    def watched(file: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(file).st_mode), path.exists()))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    change_keys(path, lambda keys: (keys, None))

    assert synced == [(False, False), (True, True)], "first the draft, then, when it is in place, its folder"
