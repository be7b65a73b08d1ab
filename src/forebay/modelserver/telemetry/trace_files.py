"""Trace files: JSON arrays that are valid at any time."""

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from forebay.modelserver.telemetry.tracing import Sampler, TraceSettings

WRITE_EVERY_S: Final = 1.0
WAITING_MAX: Final = 100_000
WAITING_BYTES_MAX: Final = 256 * 2**20
"""Traces that have not been written; more are dropped and counted."""


class _Batch(NamedTuple):
    path: str
    """Path from the setting."""
    numbered: bool
    """Written to a file of its own, with the next number as suffix."""
    traces: Sequence[bytes]


class TraceFiles:
    """Collects traces and writes them periodically, outside the event loop.

    A numbered file is written once, before it has all of its traces if they are too many to be kept; the plain file
    of a setting grows.
    """

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._waiting: deque[_Batch] = deque()
        self._count = 0
        self._bytes = 0
        self._full = False
        """A trace was dropped: all others are to be written."""
        self._begun: set[str] = set()
        self._numbers: dict[str, int] = {}
        self.lost = 0
        """Traces that could not be written."""

    def add(self, sampler: Sampler, trace: bytes) -> None:
        """Add one trace: comma-separated JSON objects."""
        if self._count >= WAITING_MAX or self._bytes + len(trace) > WAITING_BYTES_MAX:
            self._full = True
            self.lost += 1
            due = sampler.add(None)
        else:
            self._count += 1
            self._bytes += len(trace)
            due = sampler.add(trace)
        if due:
            self._take(sampler, numbered=True)

    def retire(self, sampler: Sampler) -> None:
        """Write what a replaced sampler still holds."""
        self._take(sampler, numbered=sampler.setting.log_frequency > 0)

    async def run(self, settings: TraceSettings) -> None:
        """Write periodically until cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self.flush(settings, last=False)

    async def flush(self, settings: TraceSettings, *, last: bool) -> None:
        """Write what is waiting; incomplete numbered files wait for more traces unless `last`."""
        full, self._full = self._full, False
        for sampler in settings.samplers():
            if last or full or not sampler.setting.log_frequency:
                self.retire(sampler)
        batches = list(self._waiting)
        self._waiting.clear()
        if batches:
            await asyncio.to_thread(self._write, batches)
        for batch in batches:
            self._count -= len(batch.traces)
            self._bytes -= sum(map(len, batch.traces))

    def _take(self, sampler: Sampler, *, numbered: bool) -> None:
        traces, sampler.traces = sampler.traces, []
        if traces:
            self._waiting.append(_Batch(sampler.setting.file, numbered, traces))

    def _write(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            text = b",\n".join(batch.traces)
            try:
                if batch.numbered:
                    number = self._numbers.get(batch.path, 0)
                    self._numbers[batch.path] = number + 1
                    _begin(f"{batch.path}.{number}", text)
                else:
                    self._append(batch.path, text)
            except OSError as error:
                self.lost += len(batch.traces)
                self._log.error("traces cannot be written", file=batch.path, reason=str(error))

    def _append(self, path: str, text: bytes) -> None:
        """Overwrite the closing bracket with the new traces. Raises OSError; the file is then as before."""
        if path not in self._begun or not _size_bytes(path):  # someone has moved or emptied it
            _begin(path, text)
            self._begun.add(path)
            return
        with Path(path).open("r+b", buffering=0) as file:
            end = file.seek(-1, os.SEEK_END)
            left = memoryview(b",\n%b]" % text)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(end + 1)  # keeps its last block: the bracket has a place on a full disk, too
                file.seek(end)
                file.write(b"]")
                raise


def _begin(path: str, text: bytes) -> None:
    """Write a new file. Raises OSError; the file is then empty."""
    try:
        Path(path).write_bytes(b"[%b]" % text)
    except OSError:
        with suppress(OSError):
            os.truncate(path, 0)
        raise


def _size_bytes(path: str) -> int:
    """0 if there is no such file."""
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0
