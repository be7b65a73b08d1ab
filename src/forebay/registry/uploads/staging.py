"""Files as they arrive, in parts and by their digests, until all of an artifact are there.

A file only grows, under a lock, and what lies in it is never changed: so who goes on after a break, and two who send
the same, need to know its size and nothing else. Nothing is believed before it was read: what is not what its digest
says is removed.
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
from forebay.registry.artifacts import describe, entries
from forebay.registry.sources import Progress, SourceError

ABANDONED_S: Final = 2 * 86_400.0
"""What was not touched for so long is removed."""
SPARE_BYTES: Final = 256 * 1024 * 1024
"""Of the disk: uploads leave so much for what else is written there."""
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_TREE: Final = ".tree-"


@dataclass(frozen=True, slots=True)
class Lacking:
    """A content that is not all there, and how much of it is."""

    sha256: str
    size_bytes: int
    have_bytes: int


class Staging:
    """Uploads below a folder. Several processes may use it at once.

    `known`: where the registry has a content already, None: nowhere. `ready` makes the folder, and raises
    `SourceError` if it cannot take so many bytes.
    """

    def __init__(
        self, folder: Path, known: Callable[[str], Path | None], ready: Callable[[Path, int], None] | None = None
    ) -> None:
        self._folder = folder
        self._known = known
        self._ready = ready or _on_disk

    def lacking(self, manifest: Manifest) -> tuple[Lacking, ...]:
        """What is to be sent, each content once. Raises `SourceError` if there is no room for it."""
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
        """Take a part of a content; returns how many bytes of it are there, from its beginning on.

        A part that does not follow on them changes nothing: the answer says where to go on. Raises `SourceError`.
        """
        if offset + len(part) > size_bytes:
            raise SourceError(f"{sha256}: has {size_bytes} bytes, and this part ends at {offset + len(part)}")
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
        """The files of an artifact, every byte proved: a folder of that name, or a lone file. What was sent is
        removed at the end, or, if that raises, stays. Raises `SourceError` for what is lacking, or not as was said.
        """
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
        """Remove what was abandoned; returns the bytes that are free now."""
        freed, now = 0, wall_s()
        for each in entries(self._folder):
            with suppress(FileNotFoundError):  # somebody else was quicker
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
            os.utime(path)  # somebody goes on with it
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
            raise SourceError(f"{file.path}: is not all there; send it again")
        return known

    def _prove(self, manifest: Manifest, path: Path, progress: Progress) -> None:
        wrong = differences(manifest, {file.path: file for file in describe(path, progress).files})
        if wrong:
            named = {each.path for each in wrong}
            self._drop(file for file in manifest.files if file.path in named)
            raise SourceError("; ".join(f"{each.path}: {each.found}" for each in wrong))

    def _drop(self, files: Iterable[File]) -> None:
        for file in files:
            self._staged(file.sha256, file.size_bytes).unlink(missing_ok=True)

    def _staged(self, sha256: str, size_bytes: int) -> Path:
        """Two sizes of one digest are two files: one of them is wrong, and cannot spoil the other."""
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
        f"the disk that holds {folder} is full: free some space; what was sent stays, and is gone on with"
    )


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)
