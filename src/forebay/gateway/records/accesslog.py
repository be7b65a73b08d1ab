"""The access log: one JSON line per request, written in batches. Never prompts, answers or headers."""

import asyncio
import sys
from typing import BinaryIO, Final

import msgspec

from forebay.gateway.records.lines import Dropped, Line
from forebay.obs.clock import wall_s

HELD_LINES_MAX: Final = 20_000
"""More lines than this between two writes are dropped, and the drop is logged."""


class AccessLog:
    """Collects lines; `flush` writes them."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = stream or sys.stderr.buffer
        self._lines: list[bytes] = []
        self._dropped = 0
        self._encode = msgspec.json.Encoder().encode

    def add(self, line: Line) -> bytes:
        """Note a line. Returns it as it is written, without a newline."""
        raw = self._encode(line)
        if len(self._lines) < HELD_LINES_MAX:
            self._lines.append(raw)
        else:
            self._dropped += 1
        return raw

    def flush(self) -> None:
        """Write what was collected; what cannot be written is counted as dropped."""
        lost = self._write(*self._taken())
        self._dropped += lost

    async def flush_aside(self) -> None:
        """`flush` on another thread: no request waits for whoever reads the log."""
        if self._lines or self._dropped:
            lost = await asyncio.get_running_loop().run_in_executor(None, self._write, *self._taken())
            self._dropped += lost

    def _taken(self) -> tuple[list[bytes], int]:
        """The lines, and how many there are no more."""
        taken = self._lines, self._dropped
        self._lines, self._dropped = [], 0
        return taken

    def _write(self, lines: list[bytes], dropped: int) -> int:
        """Returns how many lines are lost, and nobody was told."""
        told = [self._encode(Dropped("access lines dropped", wall_s(), dropped))] if dropped else []
        try:
            if lines or told:
                self._stream.write(b"\n".join([*lines, *told, b""]))
                self._stream.flush()
        except OSError:  # a full disk, say, is no reason to stop serving
            return len(lines) + dropped
        return 0
