"""Contents of an artifact, and the differences of one that was found."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.registry import manifest as module
from forebay.core.registry.manifest import BadManifest, Differs, File, differences, make_manifest

A, B, C = (hashlib.sha256(name).hexdigest() for name in (b"a", b"b", b"c"))


def test_manifest_digest_is_that_of_its_sorted_lines_or_of_its_only_file() -> None:
    files = [File("b/x", 1, A), File("a", 2, B)]
    assert make_manifest(files).digest == hashlib.sha256(f"{B} a\n{A} b/x\n".encode()).hexdigest()
    assert make_manifest(files[::-1]) == make_manifest(files)
    assert make_manifest(files).size_bytes == 3
    assert make_manifest([File("m.gguf", 1, A)], lone=True).digest == A


@pytest.mark.parametrize(
    "path",
    ["", "/a", "../a", "a/../b", "a//b", "./a", "a/", "a\nb", "a\0b", "x" * 1025, "\u00e9" * 513, "\udcff.bin"],
)
def test_escaping_or_ambiguous_path_is_rejected(path: str) -> None:
    with pytest.raises(BadManifest, match="not a path inside"):
        make_manifest([File(path, 1, A)])


@pytest.mark.parametrize(
    ("files", "lone", "said"),
    [
        ([], False, "no files"),
        ([File("a", 1, A), File("a", 1, B)], False, "twice"),
        ([File("a", 1, A), File("a/b", 1, B)], False, "is inside another file"),
        ([File("a", -1, A)], False, "no size"),
        ([File("a", 1, A[:-1])], False, "no SHA-256"),
        ([File("a", 1, A.upper())], False, "no SHA-256"),
        ([File("a", 1, A), File("b", 1, B)], True, "single file, but has 2"),
    ],
)
def test_invalid_artifact_is_rejected(files: list[File], lone: bool, said: str) -> None:
    with pytest.raises(BadManifest, match=said):
        make_manifest(files, lone)


def test_number_of_files_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILES_MAX", 1)
    with pytest.raises(BadManifest, match="2 files, more than the 1 allowed"):
        make_manifest([File("a", 1, A), File("b", 1, A)])


def test_manifest_differences_name_every_file() -> None:
    wanted = make_manifest([File("a", 1, A), File("b", 1, B), File("c", 1, C), File("e", 1, A)])
    found = {"a": File("a", 1, A), "b": File("b", 2, A), "c": File("c", 1, A), "d": File("d", 1, A)}
    assert differences(wanted, found) == (
        Differs("b", "it has 2 bytes, not 1"),
        Differs("c", f"its SHA-256 is {A}, not {C}"),
        Differs("d", "it is not part of the artifact"),
        Differs("e", "it is missing"),
    )
    assert differences(wanted, {file.path: file for file in wanted.files}) == ()


FILES = st.lists(
    st.builds(File, st.sampled_from(["a", "b", "c/d", "c/e"]), st.integers(0, 3), st.sampled_from([A, B, C])),
    min_size=1,
    unique_by=lambda file: file.path,
)


@given(FILES, FILES)
def test_different_files_have_different_manifest_digests(one: list[File], other: list[File]) -> None:
    def contents(files: list[File]) -> set[tuple[str, str]]:
        return {(file.path, file.sha256) for file in files}

    assert (make_manifest(one).digest == make_manifest(other).digest) == (contents(one) == contents(other))
