"""The file of API keys: digests only, readable by its owner only, replaced atomically, changed under a lock."""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from forebay.core.tenancy import KeyRecord
from forebay.wire.documents import UNREADABLE

FILE_MODE = 0o600
KEYS_MAX = 10_000
MEND = "repair it or restore a copy; running gateways keep using the keys they have read"

Keys: TypeAlias = tuple[KeyRecord, ...]
T = TypeVar("T")


class KeyFileError(Exception):
    """The file cannot be read or written; the text says which file and why."""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Keys
    version: Literal[1] = 1


def read_keys(path: Path) -> Keys:
    """All keys, in the order of their creation; empty if there is no file yet. Raises `KeyFileError`."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=_Document)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read ({error.strerror})") from error
    except UNREADABLE as error:
        raise KeyFileError(f"{path}: not a file of API keys ({error}); {MEND}") from error
    ids = [record.id for record in document.keys]
    if len(set(ids)) < len(ids):
        twice = sorted(key_id for key_id in set(ids) if ids.count(key_id) > 1)
        raise KeyFileError(f"{path}: more than one key has the id {', '.join(twice)}; {MEND}")
    return document.keys


def change_keys(path: Path, change: Callable[[Keys], tuple[Keys, T]]) -> T:
    """Replace all keys by the result of `change`, under the lock; returns its second result.

    Raises `KeyFileError`. Exceptions of `change` are passed on, and then the file is unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys, result = change(read_keys(path))
        if len(keys) > KEYS_MAX:
            raise KeyFileError(f"{path}: has {KEYS_MAX} keys, the most allowed; revoke some")
        _replace(path, msgspec.json.format(msgspec.json.encode(_Document(keys))))
        return result
    finally:
        os.close(lock)


def _replace(path: Path, content: bytes) -> None:
    """Runs under the lock, so no other process uses the draft."""
    draft = path.with_name(f"{path.name}.new")
    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            os.fchmod(file, FILE_MODE)  # a leftover draft may be readable by all
            with os.fdopen(file, "wb", closefd=False) as stream:
                stream.write(content)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(draft, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # or a power failure could restore the old file, and with it a revoked key
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise KeyFileError(f"{path}: cannot be written ({error.strerror})") from error
