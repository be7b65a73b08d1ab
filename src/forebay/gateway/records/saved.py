"""The small files beside the records: what the ledger has counted, where the chain ends, and whether there is one."""

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
HEAD: Final = "audit.head"
HEAD_BYTES_MAX: Final = 4096
NEIGHBOURS_MAX: Final = 256
"""More chains beside one are not looked at."""
MARK: Final = b"audit\n"
"""Stands in the lock of a folder that holds a chain, or has held one."""
HASH: Final = re.compile(r"[0-9a-f]{64}")


class Sums(msgspec.Struct, gc=False):
    """What adds up. `estimated` are requests whose tokens are the gateway's own count."""

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
    """What is saved of a key."""

    tenant: str
    model: str
    outcome: str


class Day(msgspec.Struct):
    """A day's file. `seq`: audit lines up to this one are counted."""

    seq: int = 0
    rows: list[Row] = []


class Position(msgspec.Struct):
    """Audit lines up to this one are counted, or belong to no day."""

    seq: int = 0


class SavedHead(Head, frozen=True):
    """The end of a chain, as it is saved. `open`: by a gateway that has not closed its log."""

    open: bool = False


# --- the ledger


def day_text(day: int) -> str:
    """The date of a day since the epoch, UTC."""
    return datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()


def day_file(folder: Path, day: int) -> Path:
    """Where a day is kept."""
    return folder / f"{PREFIX}{day_text(day)}.json"


def day_files(folder: Path) -> list[tuple[int, Path]]:
    """All that are there, by day."""
    found = []
    for path in folder.glob(f"{PREFIX}*.json"):
        try:
            date = datetime.fromisoformat(path.stem.removeprefix(PREFIX)).replace(tzinfo=UTC)
        except ValueError:
            continue
        found.append((int(date.timestamp()) // DAY_S, path))
    return sorted(found)


def read_day(path: Path) -> Day:
    """What a day's file says; nothing if it cannot be understood. Raises OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Day)
    except (FileNotFoundError, *UNREADABLE):
        return Day()


def read_position(folder: Path) -> int:
    """Up to which audit line all is counted. Raises OSError."""
    try:
        return msgspec.json.decode((folder / POSITION).read_bytes(), type=Position).seq
    except (FileNotFoundError, *UNREADABLE):
        return 0


# --- the chain


def read_saved_head(folder: Path) -> SavedHead | None:
    """The head of a folder's chain; None if there is none that makes sense. Raises OSError."""
    try:
        return msgspec.json.decode((folder / HEAD).read_bytes(), type=SavedHead)
    except (FileNotFoundError, *UNREADABLE):
        return None


def read_head(folder: Path) -> Head | None:
    """Where the chain of a folder ends by its head; None if there is none that makes sense. Raises OSError."""
    head = read_saved_head(folder)
    return Head(head.seq, head.hash) if head is not None else None


def save_head(folder: Path, head: SavedHead) -> None:
    """Put it into place. Raises OSError."""
    replace_file(folder / HEAD, msgspec.json.encode(head))
    with contextlib.suppress(OSError):
        _mark(folder)


def counted_to(folder: Path) -> int:
    """The last line of the chain that the ledger has counted; 0: none. Raises OSError."""
    return max([read_position(folder), *(read_day(path).seq for _, path in day_files(folder))])


def held_chain(folder: Path) -> bool:
    """Whether something beside its files says that a folder holds a chain, or has held one. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), (folder / LOCK).open("rb") as lock:
        if lock.read(len(MARK)) == MARK:
            return True
    return counted_to(folder) > 0


def heads_beside(folder: Path) -> dict[str, Head]:
    """Where the other chains end, by name. What cannot be read, or makes no sense, is left out."""
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
    """A head that somebody else writes: whatever stands there holds nobody up."""
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
