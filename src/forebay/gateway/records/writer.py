"""Append-only files: numbered series of them, written in batches, and the folder that one process owns.

A full disk never stops serving: what cannot be written is buffered up to a bound. A partial write is continued at the
very byte where it stopped.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from forebay.wire.records import Decision, frame

HELD_BYTES_MAX: Final = 16 * 1024 * 1024
"""With this much of one series buffered, nothing more is accepted."""
FRAME_DECISIONS_MAX: Final = 32
"""How many decisions go into one frame; damage to one of them in a file affects all."""
FOLDERS_MAX: Final = 16
"""Folders per gateway id: a successor starts while its predecessor drains."""
LOCK: Final = "lock"
"""Lock file in each folder: held by the process that owns it."""
MODE: Final = 0o600
"""Only the user who runs the gateway may read records."""


class Sink(Protocol):
    """An unbuffered append-only file."""

    def write(self, data: bytes, /) -> int | None:
        """Write some of the data, and return how many bytes. Raises OSError."""

    def close(self) -> None:
        """Close the file."""


Opener = Callable[[Path], Sink]


def open_append(path: Path) -> Sink:
    """The file at `path`, created if missing."""
    return open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags, MODE))


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically. Raises OSError, and then the file is unchanged."""
    draft = path.with_name(f".{path.name}.new")
    try:
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, MODE)) as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def numbered(folder: Path, stem: str, suffix: str) -> list[tuple[int, Path]]:
    """The files `STEM-00000001SUFFIX` and so on in a folder, by number."""
    found = []
    for path in folder.glob(f"{stem}-*{suffix}"):
        digits = path.name[len(stem) + 1 : -len(suffix)]
        if digits.isdecimal():
            found.append((int(digits), path))
    return sorted(found)


def folders(root: Path) -> list[Path]:
    """The folders of all gateways, by name."""
    return sorted(path for path in root.glob("*") if path.is_dir()) if root.is_dir() else []


def _lock_in(folder: Path) -> int:
    """The locked lock file of a folder, which is created if it is missing. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _is_gone(path: Path, opened: os.stat_result) -> bool:
    """Whether an open file was removed, moved, or replaced by another one. If that is unknown, it was not."""
    try:
        return not os.path.samestat(os.stat(path), opened)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


class OwnFolder:
    """A folder that only this process writes to while it runs: `GATEWAY`, `GATEWAY+1` and so on."""

    def __init__(self, root: Path, gateway: str) -> None:
        """Acquire the first free one. Raises OSError."""
        for number in range(FOLDERS_MAX):
            self.path = root / (f"{gateway}+{number}" if number else gateway)
            try:
                self._lock = _lock_in(self.path)
                return
            except BlockingIOError:
                pass
        raise OSError(errno.EBUSY, f"{FOLDERS_MAX} other processes write records of this gateway", str(root))

    def keep(self) -> None:
        """Make the folder again if someone has removed it. Raises OSError."""
        if _is_gone(self.path / LOCK, os.fstat(self._lock)):
            lock = _lock_in(self.path)
            os.close(self._lock)
            self._lock = lock

    def close(self) -> None:
        """Release the folder."""
        os.close(self._lock)


class Series:
    """Numbered files made of pieces. Pieces are written in order, and none is split across files."""

    def __init__(self, stem: str, suffix: str, bytes_max: int, open_file: Opener) -> None:
        self.held: list[bytes] = []
        """Pieces still to be written; the first may be the rest of one."""
        self.held_bytes = 0
        self.number = 0
        """The current file."""
        self._stem = stem
        self._suffix = suffix
        self._bytes_max = bytes_max
        self._open = open_file
        self._folder = Path()
        self._file: Sink | None = None
        self._path = Path()
        self._opened: os.stat_result | None = None
        self._size = 0
        self._cut = False

    def start(self, folder: Path, *, cut: bool = False) -> None:
        """Continue the newest file of a folder, with the rest of a piece if `cut`. Raises OSError."""
        files = numbered(folder, self._stem, self._suffix)
        self._folder, self._cut = folder, cut
        if files:
            self.number, newest = files[-1]
            self._size = newest.stat().st_size

    @property
    def full(self) -> bool:
        """Whether nothing more may be added."""
        return self.held_bytes >= HELD_BYTES_MAX

    def add(self, piece: bytes) -> None:
        """Buffer a piece until the next `write`."""
        self.held.append(piece)
        self.held_bytes += len(piece)

    def files(self) -> list[tuple[int, Path]]:
        """All files of the series, by number."""
        return numbered(self._folder, self._stem, self._suffix)

    def write(self) -> None:
        """Write the buffered pieces. Raises OSError if some remain."""
        if self.held and self._opened is not None and _is_gone(self._path, self._opened):
            self.close()  # what is written to such a file is lost with it
            self._size = 0
        while self.held:
            if self._size and not self._cut and self._size + len(self.held[0]) > self._bytes_max:
                self.close()
                self._size = 0
            if self._file is None:
                number = self.number if self._size else self.number + 1
                self._path = self._folder / f"{self._stem}-{number:08}{self._suffix}"
                self._file = self._open(self._path)
                with suppress(OSError):
                    self._opened = os.stat(self._path)
                self.number = number
            count = self._fitting()
            data = self.held[0] if count == 1 else b"".join(self.held[:count])
            written = self._file.write(data) or 0
            self._size += written
            self.held_bytes -= written
            if written == len(data):
                self._cut = False
                del self.held[:count]
            elif written:
                self._keep_rest(written)
            else:
                raise OSError(errno.EIO, "the file accepts no data")

    def _fitting(self) -> int:
        """How many of the pieces fit into this file: at least one."""
        room = self._bytes_max - self._size
        for count, piece in enumerate(self.held):
            room -= len(piece)
            if room < 0 and count:
                return count
        return len(self.held)

    def _keep_rest(self, written: int) -> None:
        done = 0
        while written >= len(self.held[done]):
            written -= len(self.held[done])
            done += 1
        del self.held[:done]
        self.held[0] = self.held[0][written:]
        self._cut = written > 0

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = self._opened = None


class RecordLog:
    """Decisions in a series of files of which the oldest are removed. What overflows is dropped and counted."""

    STEM: Final = "decisions"
    SUFFIX: Final = ".log"

    def __init__(self, bytes_max: int, files_max: int, open_file: Opener = open_append) -> None:
        self.dropped = 0
        """Decisions that are in no file."""
        self._files_max = files_max
        self._series = Series(self.STEM, self.SUFFIX, bytes_max, open_file)
        self._noted: list[Decision] = []
        self._framed: list[int] = []
        """Number of decisions in each piece that the series has buffered."""

    def start(self, folder: Path) -> None:
        """Continue where the last process stopped. Raises OSError."""
        self._series.start(folder)

    def add(self, decision: Decision) -> None:
        """Add a decision."""
        if self._series.full:
            self.dropped += 1
            return
        self._noted.append(decision)
        if len(self._noted) >= FRAME_DECISIONS_MAX:
            self._frame()

    def flush(self) -> None:
        """Write the buffered decisions. Raises OSError if some remain, which are retried at the next call."""
        series, number = self._series, self._series.number
        self._frame()
        try:
            series.write()
        finally:
            del self._framed[: len(self._framed) - len(series.held)]
        if series.number != number:
            for _, path in series.files()[: -self._files_max]:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; decisions still buffered are lost."""
        self.dropped += len(self._noted) + sum(self._framed)
        self._series.close()

    def _frame(self) -> None:
        noted, self._noted = self._noted, []
        if noted and not self._hold(noted):
            for decision in noted:  # one of them is too long
                self.dropped += not self._hold([decision])

    def _hold(self, decisions: list[Decision]) -> bool:
        piece = frame(decisions)
        if piece:
            self._series.add(piece)
            self._framed.append(len(decisions))
        return bool(piece)
