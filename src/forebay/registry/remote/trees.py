"""Downloads a listing of remote files: one folder per version of the listing, which exists completely or not at all.

A version is the listing itself (path, size, tag). An interrupted file is resumed; with another tag it belongs to
another version. Concurrent requests of several processes result in one download.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec

from forebay.core.registry.manifest import SURROGATE
from forebay.registry.sources import Progress, SourceError, exclusive

FILES_MAX = 100_000
PART = ".part"


@dataclass(frozen=True, slots=True, order=True)
class RemoteFile:
    """A remote file. `tag` changes with its content."""

    path: str
    size_bytes: int
    tag: str


Read = Callable[[RemoteFile, int], Iterator[bytes]]
"""The bytes of a file from an offset on. Raises `SourceError` if the file's tag has changed."""


def download_files(name: str, files: Sequence[RemoteFile], read: Read, folder: Path, progress: Progress) -> Path:
    """A folder with these files below `folder`, downloaded if needed. `name` is the source in messages.

    Raises `SourceError` for invalid paths, for files shorter or longer than listed, and when the disk is full.
    """
    _check(name, files)
    version = hashlib.sha256(msgspec.json.encode(sorted(files))).hexdigest()[:16]
    target, draft = folder / version, folder / f".{version}{PART}"
    if target.is_dir():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / f".{version}.lock", lambda: progress("waiting for another fetch", 0, None)):
            if not target.is_dir():
                _fetch_all(name, files, read, draft, progress)
                os.replace(draft, target)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise SourceError(
                f"{name}: the disk that holds {folder} is full; free some space or set FOREBAY_HOME to another disk"
            ) from error
        raise SourceError(f"{name}: cannot be kept in {folder}: {error}") from error
    return target


def _check(name: str, files: Sequence[RemoteFile]) -> None:
    if not files:
        raise SourceError(f"{name}: nothing found; name a folder that holds files")
    if len(files) > FILES_MAX:
        raise SourceError(f"{name}: has {len(files)} files, more than {FILES_MAX}; name a subfolder")
    for file in files:
        path = PurePosixPath(file.path)
        unusual = "\0" in file.path or SURROGATE.search(file.path) is not None
        if unusual or path.is_absolute() or not path.parts or ".." in path.parts or str(path) != file.path:
            raise SourceError(f"{name}: {file.path!r} is not a valid path")


def _fetch_all(name: str, files: Sequence[RemoteFile], read: Read, draft: Path, progress: Progress) -> None:
    total, done = sum(file.size_bytes for file in files), 0
    free = shutil.disk_usage(draft.parent).free
    there = sum(each.stat().st_size for each in draft.rglob("*") if each.is_file()) if draft.is_dir() else 0
    if total - there > free:
        raise SourceError(f"{name}: {total - there} bytes to download, but {draft.parent} has room for {free}")
    for file in sorted(files):
        path = draft / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            _fetch(name, file, read, path, partial(_tell, progress, f"fetching {file.path}", done, total))
        done += file.size_bytes


def _tell(progress: Progress, stage: str, before: int, total: int, done: int) -> None:
    progress(stage, before + done, total)


def _fetch(name: str, file: RemoteFile, read: Read, path: Path, fetched: Callable[[int], None]) -> None:
    part = path.with_name(f"{path.name}{PART}")
    with part.open("ab") as target:
        have = target.tell()
        if have > file.size_bytes:
            target.truncate(0)
            have = 0
        for chunk in read(file, have) if have < file.size_bytes else ():
            target.write(chunk)
            have += len(chunk)
            if have > file.size_bytes:
                break
            fetched(have)
        target.flush()
        os.fsync(target.fileno())
    if have != file.size_bytes:
        if have > file.size_bytes:
            part.unlink()
        raise SourceError(f"{name}: {file.path} arrived with {have} of {file.size_bytes}; try again")
    os.replace(part, path)
