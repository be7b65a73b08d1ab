"""Staged uploads: files arrive in parts, named by digest, until an artifact is complete.

A file only grows, under a lock, and its content is never changed: so resumed and concurrent uploads only need to know
its size. Nothing is trusted before it was read: files that do not match their digest are removed.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.core.registry.manifest import BadManifest, File, Manifest, differences
from forebay.obs.clock import wall_s
from forebay.registry.artifacts import describe, entries, is_content
from forebay.registry.sources import Progress, SourceError

ABANDONED_S: Final = 2 * 86_400.0
"""Files not touched for this long are removed."""
SPARE_BYTES: Final = 256 * 1024 * 1024
"""Disk space that uploads leave free for other data."""
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_TREE: Final = ".tree-"


@dataclass(frozen=True, slots=True)
class Lacking:
    """An incomplete content, and how much of it is there."""

    sha256: str
    size_bytes: int
    have_bytes: int


class Staging:
    """Uploads below a folder. Safe for concurrent use by several processes.

    `known`: the path of a content that the registry has already, or None. `ready` creates the folder, and raises
    `SourceError` if it has no room for so many bytes.
    """

    def __init__(
        self, folder: Path, known: Callable[[str], Path | None], ready: Callable[[Path, int], None] | None = None
    ) -> None:
        self._folder = folder
        self._known = known
        self._ready = ready or _on_disk

    def lacking(self, manifest: Manifest) -> tuple[Lacking, ...]:
        """The contents still to be uploaded, each once. Raises `SourceError` if there is no room for them."""
        found: dict[str, Lacking] = {}
        with self._named_errors():
            self._ready(self._folder, 0)
            self.sweep()
            for file in manifest.files:
                have = self._have(file)
                if have < file.size_bytes:
                    found[file.sha256] = Lacking(file.sha256, file.size_bytes, have)
            self._ready(self._folder, sum(each.size_bytes - each.have_bytes for each in found.values()))
        return tuple(found.values())

    def put(self, sha256: str, size_bytes: int, offset: int, part: bytes) -> int:
        """Append a part of a content; returns how many bytes of it are there, from its beginning on.

        A part that does not follow them changes nothing: the result says where to continue. Raises `SourceError`.
        """
        if offset + len(part) > size_bytes:
            raise SourceError(f"{sha256}: has {size_bytes} bytes, but this part ends at {offset + len(part)}")
        with self._named_errors():
            self._ready(self._folder, len(part))
            with open(self._staged(sha256, size_bytes), "ab", buffering=0, opener=_open) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                have = os.fstat(file.fileno()).st_size
                new = memoryview(part)[have - offset :] if offset <= have else b""
                while new:
                    written = file.write(new)
                    have += written
                    new = new[written:]
                return have

    @contextmanager
    def whole(self, manifest: Manifest, name: str, progress: Progress) -> Iterator[Path]:
        """The files of an artifact, with every byte verified: a folder of that name, or a single file. Uploads are
        removed at the end, unless the block raises. Raises `SourceError` for missing or mismatched files."""
        with self._named_errors():
            self._ready(self._folder, 0)
            tree = Path(tempfile.mkdtemp(prefix=_TREE, dir=self._folder))
        try:
            with self._named_errors():
                path = self._laid_out(manifest, tree, name)
                self._prove(manifest, path, progress)
            yield path
        finally:
            shutil.rmtree(tree, ignore_errors=True)
        self._drop(manifest.files)

    def sweep(self) -> int:
        """Remove abandoned uploads; returns the number of bytes freed."""
        freed, now = 0, wall_s()
        for each in entries(self._folder):
            with suppress(FileNotFoundError):  # another process was faster
                seen = each.lstat()
                if now - seen.st_mtime < ABANDONED_S:
                    continue
                if each.is_dir():
                    shutil.rmtree(each, ignore_errors=True)
                else:
                    each.unlink()
                    freed += seen.st_size
        return freed

    def _have(self, file: File) -> int:
        """How many bytes of a file are there."""
        if self._known(file.sha256) is not None:
            return file.size_bytes
        path = self._staged(file.sha256, file.size_bytes)
        with suppress(FileNotFoundError):
            os.utime(path)  # the upload is being continued
            return path.stat().st_size
        return 0

    def _laid_out(self, manifest: Manifest, tree: Path, name: str) -> Path:
        root = tree if manifest.lone else tree / name
        for file in manifest.files:
            target = root / file.path
            target.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            if file.size_bytes:
                os.link(self._all_of(file), target)
            else:
                target.touch(FILE_MODE)
        return root / manifest.files[0].path if manifest.lone else root

    def _all_of(self, file: File) -> Path:
        path = self._staged(file.sha256, file.size_bytes)
        with suppress(FileNotFoundError):
            if path.stat().st_size == file.size_bytes:
                return path
        known = self._known(file.sha256)
        if known is None:
            raise SourceError(f"{file.path}: is incomplete; upload it again")
        return known

    def _prove(self, manifest: Manifest, path: Path, progress: Progress) -> None:
        wrong = differences(manifest, {file.path: file for file in describe(path, progress).files})
        if wrong:
            named = {each.path for each in wrong}
            mistaken = [file for file in manifest.files if file.path in named]
            self._drop(mistaken)
            self._drop_damaged(mistaken)
            raise SourceError("; ".join(f"{each.path}: {each.found}" for each in wrong))

    def _drop(self, files: Iterable[File]) -> None:
        for file in files:
            self._staged(file.sha256, file.size_bytes).unlink(missing_ok=True)

    def _drop_damaged(self, files: Iterable[File]) -> None:
        """Remove what the registry has of these files and is damaged: as it is known, nobody would send it again."""
        for file in files:
            known = self._known(file.sha256)
            if known is not None and not is_content(known, file.sha256):
                known.unlink(missing_ok=True)

    def _staged(self, sha256: str, size_bytes: int) -> Path:
        """Two sizes of one digest are two files: one of them is wrong, and cannot affect the other."""
        return self._folder / f"{sha256}.{size_bytes}"

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except BadManifest as error:
            raise SourceError(str(error)) from error
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise _full(self._folder) from error
            raise SourceError(f"{error.filename or self._folder}: {error.strerror}") from error


def _on_disk(folder: Path, size: int) -> None:
    folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free - size < SPARE_BYTES:
        raise _full(folder)


def _full(folder: Path) -> SourceError:
    return SourceError(
        f"the disk that holds {folder} is full: free some space; the upload is kept and can be resumed"
    )


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)
