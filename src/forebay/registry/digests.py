"""SHA-256 of models: computed once, cached by size and modification time."""

import hashlib
import os
from pathlib import Path

import msgspec

from forebay.registry.sources import Progress, SourceError, model_file
from forebay.wire.documents import UNREADABLE

CHUNK_BYTES = 4 * 1024 * 1024


class _Record(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    sha256: str


def artifact_digest(path: Path, cache_dir: Path, progress: Progress) -> str:
    """The digest of a file, or of the names and contents of all files in a folder: the identity of an artifact."""
    if path.is_file():
        return file_digest(path, cache_dir, progress)
    lines = [
        f"{file_digest(each, cache_dir, progress)} {each.relative_to(path).as_posix()}\n"
        for each in sorted(path.rglob("*"))
        if each.is_file()
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def verify(path: Path, sha256: str, cache_dir: Path, progress: Progress) -> None:
    """Raise `SourceError` unless the model file at `path` (in a folder: see `model_file`) has this digest."""
    file = model_file(path)
    found = file_digest(file, cache_dir, progress)
    if found != sha256:
        raise SourceError(
            f"{file}: SHA-256 is {found}, but `sha256` asks for {sha256}; "
            f"if you trust the file, correct `sha256`, else remove it and fetch it again"
        )


def file_digest(path: Path, cache_dir: Path, progress: Progress) -> str:
    """The SHA-256 of a file, from the cache if the file has not changed since."""
    status = path.stat()
    key = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
    note = cache_dir / "digests" / f"{key}.json"
    try:
        record = msgspec.json.decode(note.read_bytes(), type=_Record)
    except (OSError, *UNREADABLE):
        record = None
    if record and (record.size, record.mtime_ns) == (status.st_size, status.st_mtime_ns):
        return record.sha256
    digest = _read(path, status.st_size, progress)
    _remember(note, _Record(status.st_size, status.st_mtime_ns, digest))
    return digest


def _read(path: Path, size: int, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, size)
    return digest.hexdigest()


def _remember(note: Path, record: _Record) -> None:
    """Best effort: without a cache entry the digest is computed again."""
    draft = note.with_suffix(f".{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.encode(record))
        os.replace(draft, note)
    except OSError:
        draft.unlink(missing_ok=True)
