"""The small files beside the records: the ledger's counts, the head of the chain, the mark of a chain's folder."""

import contextlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from forebay.gateway.records.writer import LOCK, MODE, folders, replace_file
from forebay.wire.documents import UNREADABLE
from forebay.wire.records import Head

DAY_S: Final = 86_400
POSITION: Final = "usage.json"
PREFIX: Final = "usage-"
DAMAGED: Final = ".damaged"
"""Suffix of a day's file that could not be parsed."""
HEAD: Final = "audit.head"
HEAD_BYTES_MAX: Final = 4096
NEIGHBOURS_MAX: Final = 256
"""At most this many other chains are witnessed."""
MARK: Final = b"audit\n"
"""Content of the lock file of a folder that holds or held a chain."""
HASH: Final = re.compile(r"[0-9a-f]{64}")


class Sums(msgspec.Struct, gc=False):
    """Additive counts. `estimated`: requests whose tokens the gateway counted itself."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    estimated: int = 0

    def add(self, other: "Sums") -> None:
        """Add another."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens
        self.estimated += other.estimated


class Row(Sums, gc=False, kw_only=True):
    """The sums of one key."""

    tenant: str
    model: str
    outcome: str


class Day(msgspec.Struct):
    """A day's file. `seq`: audit lines up to this one are counted; -1: the file cannot be parsed."""

    seq: int = 0
    rows: list[Row] = []


class Position(msgspec.Struct):
    """Audit lines up to this one are counted, or belong to no day."""

    seq: int = 0


class SavedHead(Head, frozen=True):
    """The head of a chain, as saved. `open`: the gateway has not closed its log."""

    open: bool = False


# --- the ledger


def day_text(day: int) -> str:
    """The date of a day since the epoch, UTC."""
    return datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()


def day_file(folder: Path, day: int) -> Path:
    """Path of a day's file."""
    return folder / f"{PREFIX}{day_text(day)}.json"


def day_files(folder: Path) -> list[tuple[int, Path]]:
    """All existing files, by day."""
    found = []
    for path in folder.glob(f"{PREFIX}*.json"):
        try:
            date = datetime.fromisoformat(path.stem.removeprefix(PREFIX)).replace(tzinfo=UTC)
        except ValueError:
            continue
        found.append((int(date.timestamp()) // DAY_S, path))
    return sorted(found)


def read_day(path: Path) -> Day:
    """The content of a day's file; empty if there is none, or it cannot be parsed. Raises OSError."""
    try:
        return _parse_day(path)
    except UNREADABLE:
        return Day(seq=-1)


def take_day(path: Path) -> tuple[Day, Path | None]:
    """`read_day` before the file is replaced. One that cannot be parsed is kept under the name that is returned.

    Raises OSError.
    """
    try:
        return _parse_day(path), None
    except UNREADABLE:
        kept = path.with_name(path.name + DAMAGED)
        path.replace(kept)
        return Day(), kept


def _parse_day(path: Path) -> Day:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Day)
    except FileNotFoundError:
        return Day()


def read_position(folder: Path) -> int:
    """The audit line up to which everything is counted. Raises OSError."""
    try:
        return msgspec.json.decode((folder / POSITION).read_bytes(), type=Position).seq
    except (FileNotFoundError, *UNREADABLE):
        return 0


# --- the chain


def read_saved_head(folder: Path) -> SavedHead | None:
    """The head of a folder's chain; None if there is no valid one. Raises OSError."""
    try:
        return msgspec.json.decode((folder / HEAD).read_bytes(), type=SavedHead)
    except (FileNotFoundError, *UNREADABLE):
        return None


def read_head(folder: Path) -> Head | None:
    """`read_saved_head` without its state: line number and hash. Raises OSError."""
    head = read_saved_head(folder)
    return Head(head.seq, head.hash) if head is not None else None


def save_head(folder: Path, head: SavedHead) -> None:
    """Replace the head file, and mark the folder. Raises OSError."""
    replace_file(folder / HEAD, msgspec.json.encode(head))
    with contextlib.suppress(OSError):
        _mark(folder)


def counted_to(folder: Path) -> int:
    """The last line of the chain that the ledger has counted; 0: none. Raises OSError."""
    return max([read_position(folder), *(read_day(path).seq for _, path in day_files(folder))])


def held_chain(folder: Path) -> bool:
    """Whether anything besides the log itself shows that a folder holds or held a chain. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), (folder / LOCK).open("rb") as lock:
        if lock.read(len(MARK)) == MARK:
            return True
    return counted_to(folder) > 0


def heads_beside(folder: Path) -> dict[str, Head]:
    """The heads of the other chains, by name, without those that are unreadable or invalid."""
    found: dict[str, Head] = {}
    with contextlib.suppress(OSError):
        for other in folders(folder.parent):
            head = _sound_head(other) if other.name != folder.name and other.name.isprintable() else None
            if head is not None:
                found[other.name] = head
            if len(found) >= NEIGHBOURS_MAX:
                break
    return found


def _sound_head(folder: Path) -> Head | None:
    """A head file written by another process: no content of it may block or fail this one."""
    try:
        fd = os.open(folder / HEAD, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            head = msgspec.json.decode(os.read(fd, HEAD_BYTES_MAX), type=Head)
        finally:
            os.close(fd)
    except (OSError, *UNREADABLE):
        return None
    return head if head.seq >= 0 and HASH.fullmatch(head.hash) else None


def _mark(folder: Path) -> None:
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, MODE)
    try:
        if os.pread(fd, len(MARK), 0) != MARK:
            os.pwrite(fd, MARK, 0)
    finally:
        os.close(fd)
