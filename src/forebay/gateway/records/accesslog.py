"""The access log: one JSON line per request, written in batches. Never prompts, responses or headers."""

import asyncio
import sys
from typing import BinaryIO, Final

import msgspec

from forebay.gateway.records.lines import Dropped, Line
from forebay.obs.clock import wall_s

HELD_LINES_MAX: Final = 20_000
"""Lines beyond this number between two writes are dropped, and the drop is logged."""


class AccessLog:
    """Buffers lines; `flush` writes them."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = stream or sys.stderr.buffer
        self._lines: list[bytes] = []
        self._dropped = 0
        self._encode = msgspec.json.Encoder().encode

    def add(self, line: Line) -> bytes:
        """Add a line. Returns its JSON, without a newline."""
        raw = self._encode(line)
        if len(self._lines) < HELD_LINES_MAX:
            self._lines.append(raw)
        else:
            self._dropped += 1
        return raw

    def flush(self) -> None:
        """Write the buffered lines; those that cannot be written count as dropped."""
        lost = self._write(*self._taken())
        self._dropped += lost

    async def flush_aside(self) -> None:
        """`flush` on another thread: a slow reader of the log must not delay requests."""
        if self._lines or self._dropped:
            lost = await asyncio.get_running_loop().run_in_executor(None, self._write, *self._taken())
            self._dropped += lost

    def _taken(self) -> tuple[list[bytes], int]:
        """The buffered lines and the drop count, both reset."""
        taken = self._lines, self._dropped
        self._lines, self._dropped = [], 0
        return taken

    def _write(self, lines: list[bytes], dropped: int) -> int:
        """Write lines and the drop count. Returns how many lines are lost without having been reported."""
        report = [self._encode(Dropped("access lines dropped", wall_s(), dropped))] if dropped else []
        try:
            if lines or report:
                self._stream.write(b"\n".join([*lines, *report, b""]))
                self._stream.flush()
        except OSError:  # a full disk, for example, is no reason to stop serving
            return len(lines) + dropped
        return 0
