"""The content of an artifact: its files by path, size and SHA-256, and one digest that identifies all of them."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

FILES_MAX: Final = 100_000
PATH_BYTES_MAX: Final = 1024
_SHA256: Final = re.compile("[0-9a-f]{64}")
SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Surrogates: half a character, or a byte of a name that is not UTF-8, so the path cannot be stored."""


class BadManifest(Exception):  # noqa: N818 - states the condition
    """The manifest is invalid; the text says why."""


@dataclass(frozen=True, slots=True, order=True)
class File:
    """A file of an artifact. `path` is relative to the artifact, with `/`; for a single file it is the name."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files, sorted by path. `lone`: the artifact is that single file, not a folder that holds it."""

    files: tuple[File, ...]
    lone: bool = False

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """The identity of the artifact: the file's SHA-256, or for a folder that of the lines `SHA256 PATH`."""
        if self.lone:
            return self.files[0].sha256
        lines = "".join(f"{file.sha256} {file.path}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()


def make_manifest(files: Iterable[File], lone: bool = False) -> Manifest:
    """A manifest of these files. Raises `BadManifest` for invalid ones, such as a path that leaves the artifact."""
    found = tuple(sorted(files))
    if not found:
        raise BadManifest("it has no files")
    if len(found) > FILES_MAX:
        raise BadManifest(f"it has {len(found)} files, more than the {FILES_MAX} allowed")
    if lone and len(found) != 1:
        raise BadManifest(f"it should be a single file, but has {len(found)}")
    paths = {file.path for file in found}
    if len(paths) < len(found):
        raise BadManifest("a path occurs twice")
    for file in found:
        _check(file, paths)
    return Manifest(found, lone)


def _check(file: File, paths: Iterable[str]) -> None:
    path = PurePosixPath(file.path)
    if (
        not path.parts
        or path.is_absolute()
        or ".." in path.parts
        or str(path) != file.path
        or "\n" in file.path
        or "\0" in file.path
        or len(file.path.encode(errors="replace")) > PATH_BYTES_MAX
        or SURROGATE.search(file.path)
    ):
        raise BadManifest(f"{file.path!r} is not a path inside the artifact")
    if any(str(above) in paths for above in path.parents):
        raise BadManifest(f"{file.path!r} is inside another file")
    if file.size_bytes < 0 or not _SHA256.fullmatch(file.sha256):
        raise BadManifest(f"{file.path!r} has no size or no SHA-256")


@dataclass(frozen=True, slots=True)
class Differs:
    """A file that differs from the manifest. `found` describes what is there instead."""

    path: str
    found: str


def differences(wanted: Manifest, found: Mapping[str, File]) -> tuple[Differs, ...]:
    """Differences between the files found (by path) and the manifest, in path order."""
    named = {file.path: file for file in wanted.files}
    told = []
    for path in sorted({*named, *found}):
        if path not in found:
            told.append(Differs(path, "it is missing"))
        elif path not in named:
            told.append(Differs(path, "it is not part of the artifact"))
        elif found[path].size_bytes != named[path].size_bytes:
            told.append(Differs(path, f"it has {found[path].size_bytes} bytes, not {named[path].size_bytes}"))
        elif found[path].sha256 != named[path].sha256:
            told.append(Differs(path, f"its SHA-256 is {found[path].sha256}, not {named[path].sha256}"))
    return tuple(told)
