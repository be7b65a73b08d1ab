"""The files of artifacts on this machine: each content is stored once, each artifact is a folder of hard links.

`blobs/ab/abcd…` holds contents by SHA-256; `trees/DIGEST` is an artifact as registered. Both are read-only and
created by renaming, so that a crash leaves nothing incomplete. Replicas of a node share the same pages.
"""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from forebay.core.registry.manifest import Differs, File, Manifest, differences, make_manifest
from forebay.registry.digests import CHUNK_BYTES
from forebay.registry.sources import Progress, SourceError

READ_ONLY = 0o444
_DRAFT = ".draft-"


class Artifacts:
    """Artifacts below a folder. Safe for concurrent use by several processes."""

    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs"
        self._trees = folder / "trees"

    def take(self, path: Path, progress: Progress) -> Manifest:
        """Copy a file or folder into the store, deduplicated by content. Raises `SourceError`, `BadManifest`."""
        files = files_of(path)
        try:
            self._blobs.mkdir(parents=True, exist_ok=True)
            done, total, found = 0, sum(each.stat().st_size for each in files.values()), []
            for name, each in sorted(files.items()):
                file = self._keep(each, name, partial(tell, progress, f"registering {name}", done, total))
                found.append(file)
                done += file.size_bytes
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise SourceError(f"the disk that holds {self._blobs} is full: free some space") from error
            raise SourceError(f"{path} cannot be taken into {self._blobs}: {error}") from error
        return make_manifest(found, path.is_file())

    def _keep(self, path: Path, name: str, copied: Callable[[int], None]) -> File:
        with tempfile.NamedTemporaryFile(prefix=_DRAFT, dir=self._blobs, delete=False) as draft:
            try:
                sha256, size = _copy(path, draft.fileno(), copied)
                os.fchmod(draft.fileno(), READ_ONLY)
                os.fsync(draft.fileno())
                target = self._blob(sha256)
                target.parent.mkdir(exist_ok=True)
                if is_content(target, sha256):  # hard links to it keep pointing to the same file
                    os.unlink(draft.name)
                else:
                    os.replace(draft.name, target)
            except BaseException:
                Path(draft.name).unlink(missing_ok=True)
                raise
        return File(name, size, sha256)

    def find(self, sha256: str) -> Path | None:
        """The path of a content; None: it is not stored."""
        path = self._blob(sha256)
        return path if path.is_file() else None

    def _blob(self, sha256: str) -> Path:
        return self._blobs / sha256[:2] / sha256

    def tree(self, manifest: Manifest, progress: Progress) -> Path:
        """The artifact as registered: a folder, or a single file. Raises `SourceError` if contents are missing."""
        target = self._trees / manifest.digest
        if not target.is_dir():
            self._trees.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self._trees))
            try:
                for file in manifest.files:
                    (draft / file.path).parent.mkdir(parents=True, exist_ok=True)
                    os.link(self._blob(file.sha256), draft / file.path)
                os.rename(draft, target)
            except FileNotFoundError as error:
                shutil.rmtree(draft, ignore_errors=True)
                raise SourceError(f"{error.filename}: a content is missing; register the artifact again") from error
            except OSError as error:
                shutil.rmtree(draft, ignore_errors=True)
                if not target.is_dir():  # else another process was faster
                    raise SourceError(f"{target} cannot be made: {error}") from error
        return target / manifest.files[0].path if manifest.lone else target

    def mend(self, manifest: Manifest) -> None:
        """Remove an artifact's folder that is not made of the contents as stored, so that `tree` makes a new one."""
        target = self._trees / manifest.digest
        wanted = {file.path: self._blob(file.sha256).stat().st_ino for file in manifest.files}
        if target.is_dir() and wanted != {name: (target / name).lstat().st_ino for name in _names(target)}:
            shutil.rmtree(target)

    def check(self, manifest: Manifest, progress: Progress) -> tuple[Differs, ...]:
        """Read every byte of the artifact; returns the differences from the manifest, by file."""
        folder = self._trees / manifest.digest
        if not folder.is_dir():
            self.tree(manifest, progress)
        return differences(manifest, read_files(folder, manifest, progress))

    def sweep(self, keep: Collection[Manifest]) -> int:
        """Remove all other artifacts, and leftovers of crashes; returns the number of bytes freed."""
        digests = {manifest.digest for manifest in keep}
        contents = {file.sha256 for manifest in keep for file in manifest.files}
        freed = 0
        for tree in entries(self._trees):
            if tree.name not in digests:
                shutil.rmtree(tree, ignore_errors=True)
        for each in entries(self._blobs):
            for blob in [each] if each.is_file() else list(each.iterdir()):
                if blob.name not in contents:
                    freed += blob.stat().st_size
                    blob.unlink(missing_ok=True)
        return freed


def tell(progress: Progress, stage: str, before: int, total: int, done: int) -> None:
    """Report the progress of one file of several."""
    progress(stage, before + done, max(total, before + done))  # a file may grow while it is read


def files_of(path: Path) -> dict[str, Path]:
    """All files of a folder by their relative paths, also in linked folders; a single file by its name.

    Raises OSError, also for a folder that is linked into itself.
    """
    if path.is_file():
        return {path.name: path}
    return {each.relative_to(path).as_posix(): each for each in _below(path)}


def _below(folder: Path, inside: tuple[Path, ...] = ()) -> Iterator[Path]:
    real = folder.resolve()
    if real in inside:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
    for each in folder.iterdir():
        if each.is_dir():
            yield from _below(each, (*inside, real))
        elif each.is_file():
            yield each


def describe(path: Path, progress: Progress) -> Manifest:
    """The manifest that a file or folder would be registered with; copies nothing. Raises `BadManifest`,
    `OSError`."""
    files, found, done = files_of(path), [], 0
    total = sum(each.stat().st_size for each in files.values())
    for name, each in sorted(files.items()):
        found.append(_read(each.resolve(), name, done, total, progress))
        done += found[-1].size_bytes
    return make_manifest(found, path.is_file())


def read_files(folder: Path, manifest: Manifest, progress: Progress) -> dict[str, File]:
    """The contents of a folder, fully read; a symlink counts as an empty file, which never matches."""
    found, done = {}, 0
    for name in _names(folder):
        found[name] = _read(folder / name, name, done, manifest.size_bytes, progress)
        done += found[name].size_bytes
    return found


def _names(folder: Path) -> list[str]:
    """The relative paths of everything below a folder that is not a folder itself."""
    there = sorted(each for each in folder.rglob("*") if not each.is_dir() or each.is_symlink())
    return [each.relative_to(folder).as_posix() for each in there]


def entries(folder: Path) -> list[Path]:
    """The entries of a folder; empty if it does not exist."""
    return list(folder.iterdir()) if folder.is_dir() else []


def chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, in chunks."""
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            yield chunk


def _copy(path: Path, target: int, copied: Callable[[int], None]) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    for chunk in chunks(path):
        digest.update(chunk)
        left = memoryview(chunk)
        while left:
            left = left[os.write(target, left) :]
        size += len(chunk)
        copied(size)
    return digest.hexdigest(), size


def is_content(path: Path, sha256: str) -> bool:
    """Whether a file exists and has that digest."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


def _read(path: Path, name: str, done: int, total: int, progress: Progress) -> File:
    if path.is_symlink() or not path.is_file():
        return File(name, 0, "")
    digest, size = hashlib.sha256(), 0
    for chunk in chunks(path):
        digest.update(chunk)
        size += len(chunk)
        progress(f"checking {name}", min(done + size, total), total)
    return File(name, size, digest.hexdigest())
