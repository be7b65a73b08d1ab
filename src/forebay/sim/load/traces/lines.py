"""The lines of a trace, and their limits."""

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

LINE_BYTES_MAX: Final = 1024 * 1024
"""A prompt of a million tokens has two thousand block ids: 20 KB."""
ROWS_MAX: Final = 50_000_000
"""Most requests of one trace: 16 bytes each, more with blocks and tenants."""
TOKENS_MAX: Final = 10_000_000
"""Longest prompt or response."""
SPAN_S_MAX: Final = 366 * 86_400.0
"""From the first request to the last."""
SHOWN_BYTES: Final = 80


class BadLine(Exception):  # noqa: N818 - states the condition
    """An invalid line: what was found, and what is allowed."""


class BadTrace(Exception):  # noqa: N818 - states the condition
    """A trace cannot be read: the file, the line, what was found, and what is allowed."""


class Lines:
    """The lines of a file, stripped and counted, without blank ones. Raises `BadLine` and read errors."""

    def __init__(self, file: BinaryIO) -> None:
        self.number = 0
        """Number of the last yielded line."""
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        readline = self._file.readline
        while line := readline(LINE_BYTES_MAX + 1):
            self.number += 1
            if len(line) > LINE_BYTES_MAX:
                raise BadLine(f"the line is longer than {LINE_BYTES_MAX} bytes")
            if self.number > ROWS_MAX:
                raise BadLine(f"there are more than {ROWS_MAX:,} lines")
            stripped = line.strip()
            if stripped:
                yield stripped


def shown(line: bytes) -> str:
    """The beginning of a line, for an error; unprintable characters are replaced."""
    text = re.sub(r"[^ -~]", "·", line[:SHOWN_BYTES].decode("latin-1"))
    return f"{text!r}{'…' if len(line) > SHOWN_BYTES else ''}"
