"""Fetching a listing of files: complete or absent, resumed where it was interrupted, never more than listed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.registry.remote import trees
from forebay.registry.remote.trees import RemoteFile, download_files
from forebay.registry.sources import SourceError

CONTENT = {"model.onnx": bytes(range(200)), "tokenizer/vocab.txt": b"abc", "empty": b""}


class FakeRemote:
    """A remote that records its reads, and fails after `breaks_after` chunks."""

    def __init__(self, content: dict[str, bytes], tag: str = "1") -> None:
        self.content = content
        self.files = [RemoteFile(path, len(data), tag) for path, data in content.items()]
        self.asked: list[tuple[str, int]] = []
        self.breaks_after: int | None = None
        self.adds = b""

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        self.asked.append((file.path, offset))
        data = self.content[file.path][offset:] + self.adds
        for begin in range(0, len(data), 64):
            if self.breaks_after is not None:
                if self.breaks_after <= 0:
                    raise SourceError("the line broke")
                self.breaks_after -= 1
            yield data[begin : begin + 64]


def quiet(stage: str, done: int, total: int | None) -> None:
    assert total is None or done <= total


def contents(folder: Path) -> dict[str, bytes]:
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_fetched_tree_is_complete_and_not_fetched_again(tmp_path: Path) -> None:
    place = FakeRemote(CONTENT)
    found = download_files("x", place.files, place.read, tmp_path, quiet)
    assert contents(found) == CONTENT
    place.asked.clear()
    assert download_files("x", place.files[::-1], place.read, tmp_path, quiet) == found
    assert place.asked == []


def test_changed_tag_is_a_new_version_and_keeps_the_old_one(tmp_path: Path) -> None:
    old, new = FakeRemote(CONTENT), FakeRemote({**CONTENT, "tokenizer/vocab.txt": b"xyz"}, "2")
    first = download_files("x", old.files, old.read, tmp_path, quiet)
    second = download_files("x", new.files, new.read, tmp_path, quiet)
    assert contents(first) == CONTENT
    assert contents(second) == new.content


@given(breaks=st.lists(st.integers(0, 3), max_size=12))
def test_no_bytes_are_fetched_twice_across_interruptions(
    tmp_path_factory: pytest.TempPathFactory, breaks: list[int]
) -> None:
    folder, place = tmp_path_factory.mktemp("t"), FakeRemote(CONTENT)
    for chunks in breaks:
        place.breaks_after = chunks
        try:
            download_files("x", place.files, place.read, folder, quiet)
        except SourceError:
            assert not [each for each in folder.iterdir() if not each.name.startswith(".")]
    place.breaks_after = None
    assert contents(download_files("x", place.files, place.read, folder, quiet)) == CONTENT
    offsets = [offset for path, offset in place.asked if path == "model.onnx"]
    assert offsets == sorted(offsets)


def test_concurrent_fetches_share_one_download(tmp_path: Path) -> None:
    place = FakeRemote(CONTENT)
    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda _: download_files("x", place.files, place.read, tmp_path, quiet), range(6)))
    assert len(found) == 1
    assert sorted(path for path, _ in place.asked) == ["model.onnx", "tokenizer/vocab.txt"]


@pytest.mark.parametrize(("listed", "adds", "said"), [(201, b"", "arrived with 200 of 201"), (200, b"x", "201")])
def test_file_with_unexpected_length_is_rejected(tmp_path: Path, listed: int, adds: bytes, said: str) -> None:
    place = FakeRemote({"model.onnx": CONTENT["model.onnx"]})
    place.adds = adds
    with pytest.raises(SourceError, match=said):
        download_files("x", [RemoteFile("model.onnx", listed, "1")], place.read, tmp_path, quiet)
    place.adds, place.content = b"", {"model.onnx": bytes(listed)}
    assert (
        len(
            contents(download_files("x", [RemoteFile("model.onnx", listed, "1")], place.read, tmp_path, quiet))[
                "model.onnx"
            ]
        )
        == listed
    )


@pytest.mark.parametrize("path", ["m\0.onnx", "m\ud800.onnx", "", "/etc/x", "../x", "a/../../x", "a//b", "."])
def test_paths_outside_the_folder_are_rejected(tmp_path: Path, path: str) -> None:
    place = FakeRemote({path: b"x"})
    with pytest.raises(SourceError, match="not a valid path"):
        download_files("x", place.files, place.read, tmp_path, quiet)


def test_empty_oversized_or_unstorable_tree_is_rejected_before_fetching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = FakeRemote(CONTENT)
    with pytest.raises(SourceError, match="nothing found"):
        download_files("x", [], place.read, tmp_path, quiet)
    with pytest.raises(SourceError, match="has room for"):
        download_files("x", [RemoteFile("big", 2**60, "1")], place.read, tmp_path, quiet)
    monkeypatch.setattr(trees, "FILES_MAX", 2)
    with pytest.raises(SourceError, match="3 files, more than 2"):
        download_files("x", place.files, place.read, tmp_path, quiet)
    assert place.asked == []
    with pytest.raises(SourceError, match="cannot be kept"):
        download_files("x", place.files[:1], place.read, Path("/proc/none"), quiet)
