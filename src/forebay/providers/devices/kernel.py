"""XID errors from the kernel log, where the driver writes them: `NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen
…`."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from forebay.core.health import DeviceEvent, DeviceReading
from forebay.providers.devices.protocol import DeviceSource, DevicesUnknown

XID: Final = re.compile(r"NVRM: Xid \((PCI:[0-9a-fA-F:.]+)(?: [^)]*)?\): (\d{1,6})(?:, (.*))?")
"""With MIG the address may be followed by ` GPU-I:05`, an instance number that cannot be mapped to an id here: the
error counts for the whole GPU."""
TEXT_CHARS_MAX: Final = 400
RECORD_BYTES_MAX: Final = 8192
"""`/dev/kmsg` returns one record per read, and none is larger."""
READ_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a file, per call; the rest is read next time."""
TOLD_MAX: Final = 1000
"""Events of the other source that wait."""


def parse(line: str, at: float) -> DeviceEvent | None:
    """The error reported by a line of the kernel log; None: it reports none."""
    found = XID.search(line)
    if found is None:
        return None
    return DeviceEvent(at, found[1], int(found[2]), (found[3] or "").strip()[:TEXT_CHARS_MAX])


class KernelLog:
    """The errors in a log, combined with the readings and events of another source, if any.

    Reading starts at the end of the log. A file that is truncated is read from its beginning; one that is replaced is
    read to its end first.
    """

    def __init__(self, path: Path, of: DeviceSource | None, wall_s: Callable[[], float]) -> None:
        self._path = path
        self._of = of
        self._wall = wall_s
        self._file: int | None = None
        self._inode = 0
        self._half = b""
        self._told: list[DeviceEvent] = []
        """Events of the other source that wait until the log can be read, too."""

    def readings(self) -> tuple[DeviceReading, ...]:
        return self._of.readings() if self._of is not None else ()

    def events(self) -> tuple[DeviceEvent, ...]:
        if self._of is not None:
            self._told = [*self._told, *self._of.events()][-TOLD_MAX:]
        try:
            lines = self._lines()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # what is being rotated has lines that were not read
                self._drop()
            raise DevicesUnknown(f"{self._path}: {error.strerror}") from error
        at = self._wall()
        told, self._told = self._told, []
        return (*told, *(event for line in lines if (event := parse(line.decode(errors="replace"), at))))

    def close(self) -> None:
        self._drop()
        if self._of is not None:
            self._of.close()

    def _drop(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _lines(self) -> list[bytes]:
        stat = os.stat(self._path)
        another, rest = self._inode not in (0, stat.st_ino), b""
        if another and self._file is not None:
            rest = self._read(self._file) + b"\n"
            self._drop()
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            if not another:
                os.lseek(self._file, 0, os.SEEK_END)
        elif self._path.is_file() and stat.st_size < os.lseek(self._file, 0, os.SEEK_CUR):
            os.lseek(self._file, 0, os.SEEK_SET)
        self._inode = stat.st_ino
        *lines, self._half = (self._half + rest + self._read(self._file)).split(b"\n")
        self._half = self._half[-RECORD_BYTES_MAX:]
        return lines

    def _read(self, file: int) -> bytes:
        parts, size = [], 0
        while size < READ_BYTES_MAX:
            try:
                part = os.read(file, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except BrokenPipeError:  # /dev/kmsg: records were overwritten before they were read
                continue
            if not part:
                break
            parts.append(part)
            size += len(part)
        return b"".join(parts)
