"""Artifacts encrypted at rest, and decrypted into memory only when a replica is about to load them.

`sealed/DIGEST` holds the wrapped key, and the files by number in the order of their paths. It is created by renaming,
key and files together. Decrypted files are on a tmpfs: never on disk, unless the machine swaps.
"""

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from forebay.core.registry.manifest import Differs, File, Manifest, differences, make_manifest
from forebay.registry.artifacts import chunks, entries, files_of, read_files, tell
from forebay.registry.sealing import KEY_BYTES, Wrapper, seal, unseal
from forebay.registry.sources import Progress, SourceError

KEY_NAME: Final = "key"
MEMORY_KINDS: Final = ("tmpfs", "ramfs")
MEMORY_MODE: Final = 0o700
_DRAFT: Final = ".draft-"
_CACHE: Final = "-cache"
_UPLOADS: Final = "uploads"


class Vault:
    """Encrypted artifacts below a folder. `wrapper` None: there is no key, and they cannot be decrypted."""

    def __init__(self, folder: Path, wrapper: Wrapper | None, memory: Path) -> None:
        self._sealed = folder / "sealed"
        self._wrapper = wrapper
        self._memory = memory

    def has(self, digest: str) -> bool:
        """Whether an artifact is stored here."""
        return (self._sealed / digest).is_dir()

    def cache(self, digest: str) -> Path:
        """Where to keep files derived from an artifact."""
        return self._memory / f"{digest}{_CACHE}"

    def take(self, path: Path, progress: Progress) -> Manifest:
        """Encrypt a file or folder. Raises `SourceError`, `BadManifest`."""
        assert self._wrapper is not None
        key = os.urandom(KEY_BYTES)
        wrapped = self._wrapper.wrap(key)
        try:
            self._sealed.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self._sealed))
            damaged = draft.with_name(f"{draft.name}-damaged")
            try:
                manifest = _seal_all(path, draft, key, progress)
                _write(draft / KEY_NAME, wrapped.encode())
                if self.has(manifest.digest) and not self._is_whole(manifest, progress):
                    os.rename(self._sealed / manifest.digest, damaged)
                if not self.has(manifest.digest):
                    with suppress(FileExistsError):  # another process was faster
                        os.rename(draft, self._sealed / manifest.digest)
                return manifest
            finally:
                shutil.rmtree(draft, ignore_errors=True)
                shutil.rmtree(damaged, ignore_errors=True)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise SourceError(f"the disk that holds {self._sealed} is full: free some space") from error
            raise SourceError(f"{path} cannot be taken into {self._sealed}: {error}") from error

    @property
    def uploads(self) -> Path:
        """Where to keep uploads until they are encrypted: never in the clear on a disk."""
        return self._memory / _UPLOADS

    def make_ready(self, folder: Path, size_bytes: int) -> None:
        """Create a folder in memory. Raises `SourceError` if there is not enough room, or it is not in memory."""
        self._check_memory(size_bytes)
        folder.mkdir(MEMORY_MODE, exist_ok=True)

    def tree(self, manifest: Manifest, progress: Progress) -> Path:
        """The artifact in memory, with every byte verified: a folder, or a single file. Raises `SourceError`."""
        target = self._memory / manifest.digest
        self._check_memory(0 if target.is_dir() else manifest.size_bytes)
        if target.is_dir() and differences(manifest, read_files(target, manifest, progress)):
            shutil.rmtree(target)  # it was modified
        if not target.is_dir():
            draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self._memory))
            try:
                wrong = differences(manifest, dict(self._opened(manifest, draft, progress)))
                if wrong:
                    raise SourceError("\n".join(f"{each.path}: {each.found}" for each in wrong))
                os.rename(draft, target)
            except OSError as error:
                if not target.is_dir():
                    raise SourceError(f"{target} cannot be made: {error}") from error
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return target / manifest.files[0].path if manifest.lone else target

    def check(self, manifest: Manifest, progress: Progress) -> tuple[Differs, ...]:
        """Decrypt and read every byte, storing nothing; returns the differences from the manifest, by file."""
        extra = {each.name for each in entries(self._sealed / manifest.digest)}
        extra -= {KEY_NAME, *(str(number) for number in range(len(manifest.files)))}
        found = dict(self._opened(manifest, None, progress))
        return (*differences(manifest, found), *(Differs(name, "it is not part of it") for name in sorted(extra)))

    def _is_whole(self, manifest: Manifest, progress: Progress) -> bool:
        try:
            return not self.check(manifest, progress)
        except (SourceError, OSError):
            return False

    def sweep(self, keep: Collection[Manifest]) -> int:
        """Remove all other artifacts, on disk and in memory; returns the number of bytes freed on disk."""
        digests, freed = {manifest.digest for manifest in keep}, 0
        for folder in (*entries(self._sealed), *entries(self._memory)):
            if folder.name.removesuffix(_CACHE) not in digests and folder != self.uploads:
                freed += sum(each.stat().st_size for each in entries(folder)) if folder.parent == self._sealed else 0
                shutil.rmtree(folder, ignore_errors=True)
        return freed

    def _opened(self, manifest: Manifest, target: Path | None, progress: Progress) -> Iterator[tuple[str, File]]:
        """The decrypted files by path, as found; also written below `target` if given."""
        folder, done = self._sealed / manifest.digest, 0
        key = self._key(folder)
        for number, file in enumerate(manifest.files):
            digest, size = hashlib.sha256(), 0
            try:
                with (folder / str(number)).open("rb") as source, _Sink(target, file.path) as sink:
                    for chunk in unseal(source, key, number):
                        digest.update(chunk)
                        size += len(chunk)
                        sink.write(chunk)
                        progress(
                            f"decrypting {file.path}", min(done + size, manifest.size_bytes), manifest.size_bytes
                        )
            except FileNotFoundError:
                continue
            except SourceError as error:
                raise SourceError(f"{file.path}: {error}") from error
            done += size
            yield file.path, File(file.path, size, digest.hexdigest())

    def _key(self, folder: Path) -> bytes:
        if self._wrapper is None:
            raise SourceError("is encrypted, and `registry.encryption` names no key")
        try:
            return self._wrapper.unwrap((folder / KEY_NAME).read_text("ascii"))
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"the wrapped key cannot be read: {error}") from error

    def _check_memory(self, size_bytes: int) -> None:
        try:
            self._memory.parent.mkdir(MEMORY_MODE, parents=True, exist_ok=True)
            self._memory.mkdir(MEMORY_MODE, exist_ok=True)
            if not (_is_ours(self._memory) and _is_safe(self._memory.parent)):
                raise SourceError(f"{self._memory}: other users can modify it; remove it, or name another")
            self._memory.chmod(MEMORY_MODE)
        except OSError as error:
            raise SourceError(f"{self._memory}: cannot be used ({error.strerror})") from error
        if _kind_of(self._memory) not in MEMORY_KINDS:
            raise SourceError(f"{self._memory}: is on a disk; `registry.memory_folder` must be on a tmpfs")
        free = shutil.disk_usage(self._memory).free
        if free < size_bytes:
            raise SourceError(f"{self._memory}: has room for {free} bytes, but {size_bytes} are needed")


class _Sink:
    """The target of decrypted bytes: a file, or nowhere."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._file = None
        if folder is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._file = (folder / name).open("xb")
            os.fchmod(self._file.fileno(), 0o400)

    def __enter__(self) -> "_Sink":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, chunk: bytes) -> None:
        """Write it, if there is a file."""
        if self._file is not None:
            self._file.write(chunk)


class _Counted:
    """The chunks of a file; counts and hashes them while they are read."""

    def __init__(self, path: Path, told: Callable[[int], None]) -> None:
        self._path = path
        self._told = told
        self._digest = hashlib.sha256()
        self._size = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in chunks(self._path):
            self._digest.update(chunk)
            self._size += len(chunk)
            self._told(self._size)
            yield chunk

    def file(self, name: str) -> File:
        """The file's entry in the manifest."""
        return File(name, self._size, self._digest.hexdigest())


def _seal_all(path: Path, draft: Path, key: bytes, progress: Progress) -> Manifest:
    found, done = [], 0
    named = sorted(files_of(path).items())
    total = sum(each.stat().st_size for _, each in named)
    for number, (name, each) in enumerate(named):
        counted = _Counted(each, partial(tell, progress, f"encrypting {name}", done, total))
        with (draft / str(number)).open("xb") as target:
            seal(counted, target, key, number)
            target.flush()
            os.fsync(target.fileno())
        found.append(counted.file(name))
        done += found[-1].size_bytes
    return make_manifest(found, path.is_file())


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _is_ours(folder: Path) -> bool:
    seen = folder.lstat()
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid()


def _is_safe(folder: Path) -> bool:
    """Whether only we or root can replace an entry of the folder."""
    seen = folder.stat()
    open_to_others = seen.st_mode & 0o022 and not seen.st_mode & stat.S_ISVTX
    return seen.st_uid in (0, os.geteuid()) and not open_to_others


def _kind_of(path: Path) -> str:
    """The type of the file system of a path."""
    best = ("", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        place, kind = line.split()[1:3]
        under = str(path.resolve()) == place or str(path.resolve()).startswith(place.rstrip("/") + "/")
        if under and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]
