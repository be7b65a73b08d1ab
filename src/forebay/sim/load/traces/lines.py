"""The lines of a trace, and what is allowed in them."""

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

LINE_BYTES_MAX: Final = 1024 * 1024
"""A prompt of a million tokens names two thousand blocks: 20 KB."""
ROWS_MAX: Final = 50_000_000
"""Requests of one trace: 16 bytes each, more with blocks and tenants."""
TOKENS_MAX: Final = 10_000_000
"""Of one prompt or answer."""
SPAN_S_MAX: Final = 366 * 86_400.0
"""From the first request to the last."""
SHOWN_BYTES: Final = 80


class BadLine(Exception):  # noqa: N818 - states the condition
    """A line cannot be used: what was found, what is allowed."""


class BadTrace(Exception):  # noqa: N818 - states the condition
    """A trace cannot be read: which file, which line, what was found, what is allowed."""


class Lines:
    """The lines of a file without their ends, counted; blank ones are left out. Raises `BadLine` and what reading
    raises."""

    def __init__(self, file: BinaryIO) -> None:
        self.number = 0
        """Of the line that was given last."""
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
    """The beginning of a line, for an error; what cannot be printed is left out."""
    text = re.sub(r"[^ -~]", "·", line[:SHOWN_BYTES].decode("latin-1"))
    return f"{text!r}{'…' if len(line) > SHOWN_BYTES else ''}"
