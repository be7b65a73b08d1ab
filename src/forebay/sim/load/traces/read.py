"""Reading a trace of any known format, which is detected from its content."""

import gzip
import io
import zlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from random import Random
from typing import BinaryIO, Final, cast

from forebay.sim.load.change import jittered
from forebay.sim.load.columns import Columns
from forebay.sim.load.traces.decisions import decisions, files
from forebay.sim.load.traces.lines import BadLine, BadTrace, Lines, shown
from forebay.sim.load.traces.mooncake import BLOCK_TOKENS, mooncake
from forebay.sim.load.traces.tables import layout, table
from forebay.sim.load.values import Workload
from forebay.wire.records import MAGIC

BUFFER_BYTES: Final = 256 * 1024
LOG_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Limit of a decision file, which is read into memory."""
KNOWN: Final = (
    "JSON lines with timestamp, input_length, output_length and hash_ids (Mooncake); a table with the header "
    "TIMESTAMP,ContextTokens,GeneratedTokens (Azure) or t_s,input_tokens,output_tokens and maybe client (ServeGen); "
    "decision records of a gateway, a file or a folder of them"
)
_GZIP: Final = b"\x1f\x8b"
_BROKEN: Final = (EOFError, zlib.error, gzip.BadGzipFile)


def read(path: Path, rng: Random, model: str = "", name: str = "") -> Workload:
    """Read a trace, gzipped or not. Times are relative to the first request; the name records transformations.

    `rng` spreads requests whose times a coarse clock has rounded, `model` selects from decision records, `name`
    replaces the file's name. Raises `BadTrace`.
    """
    try:
        if path.is_dir():
            return _recorded(path, map(Path.read_bytes, files(path)), model, name)
        with path.open("rb") as raw, _unzipped(raw) as file:
            if MAGIC in file.peek():
                return _recorded(path, [file.read(LOG_BYTES_MAX)], model, name)
            if model:
                raise BadTrace(f"{path}: a model ({model!r}) can be chosen from decision records only")
            return _written(path, file, rng, name)
    except _BROKEN as error:
        raise BadTrace(f"{path}: the file is truncated or damaged: {error}") from error
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or error}") from error


def _unzipped(raw: BinaryIO) -> io.BufferedReader:
    zipped = raw.read(2) == _GZIP
    raw.seek(0)
    return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=raw) if zipped else raw), BUFFER_BYTES)


def _recorded(path: Path, logs: Iterable[bytes], model: str, name: str) -> Workload:
    try:
        logged = decisions(logs, model)
    except BadLine as error:
        raise BadTrace(f"{path}: {error}") from error
    notes = [f"of {model}"] if model else []
    if logged.uncounted:
        notes.append(f"left out, without tokens: {logged.uncounted}")
    if logged.damaged:
        notes.append(f"damaged parts: {logged.damaged}")
    return _workload(path, logged.columns, name, notes)


def _written(path: Path, file: BinaryIO, rng: Random, name: str) -> Workload:
    lines = Lines(file)
    rows = iter(lines)
    try:
        first = next(rows, b"")
        if first.startswith(b"{"):
            columns, quantum_s = mooncake(chain((first,), rows))
            workload = _workload(path, columns, name, [])
            return jittered(workload, quantum_s, rng) if quantum_s else workload
        places = layout(first)
        if places is None:
            raise BadLine(f"found {shown(first) if first else 'nothing'}; a trace is one of: {KNOWN}")
        return _workload(path, table(rows, places), name, [])
    except BadLine as error:
        raise BadTrace(f"{path}, line {lines.number}: {error}") from error


def _workload(path: Path, columns: Columns, name: str, notes: list[str]) -> Workload:
    if not columns:
        raise BadTrace(f"{path}: it has no requests")
    return Workload(" ".join((name or path.name, *(f"({note})" for note in notes))), columns, BLOCK_TOKENS)
