"""`forebay audit`: is the log whole, and what does it say."""

from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.cli.settings import UserError
from forebay.gateway.records.audit import STEM, SUFFIX, ChainReport, FileReport, read_head
from forebay.gateway.records.audit import verify as verify_chain
from forebay.gateway.records.writer import folders, numbered
from forebay.wire.records import AuditLine, Event, audit_line, unseal

TAIL_COLUMNS = (
    "time (UTC)",
    "tenant",
    "key",
    "client",
    "model",
    "revision",
    "replica",
    "outcome",
    "ms",
    "tokens",
    "request",
)


TAIL_CHARS_MAX = 400
"""Of a line; a terminal breaks it where it ends."""


def chains(root: Path) -> list[Path]:
    """The folders that hold a chain, or what is left of one. Raises `UserError` if there is none."""
    found = [f for f in folders(root) if read_head(f) is not None or numbered(f, STEM, SUFFIX)]
    if not found:
        raise UserError(f"There is no audit log in {root}. Is gateway.records.audit on?")
    return found


def verify(root: Path, archived: bool, as_json: bool, screen: Console) -> int:
    """Check all chains and print what was found; 1 if anything was changed or removed. Raises `UserError`."""
    try:
        reports = [verify_chain(folder, archived=archived) for folder in chains(root)]
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}. Files come and go while gateways run: try again."
        ) from error
    ok = all(report.ok for report in reports)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"ok": ok, "chains": [document(r) for r in reports]})).decode())
    else:
        for report in reports:
            _print(report, screen)
        verdict = ("No line was changed or removed.", "green") if ok else ("The audit log is damaged.", "bold red")
        screen.print(Text(*verdict))
    return 0 if ok else 1


def document(report: ChainReport) -> dict[str, Any]:
    """A report as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(report)
    for part in (plain, *plain["files"]):
        part["flaws"] = [dict(zip(("kind", "line", "text"), flaw, strict=True)) for flaw in part["flaws"]]
    return {"ok": report.ok, **plain}


def _print(report: ChainReport, screen: Console) -> None:
    head = f"head {report.head.seq} {report.head.hash}" if report.head else "no head"
    screen.print(Text.assemble((report.chain, "bold"), f"  {head}"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="bold")
    for name in ("file", "lines", "first (UTC)", "last (UTC)", ""):
        table.add_column(name, justify="right" if name == "lines" else "left", no_wrap=True)
    for file in report.files:
        verdict = Text("damaged", style="bold red") if file.flaws else Text("ok", style="green")
        table.add_row(file.name, f"{file.lines:,}", _time(file.first), _time(file.last), verdict)
    screen.print(table)
    for file in report.files:
        for text in _notes(file):
            screen.print(text)
    for flaw in report.flaws:
        place = f"{report.files[0].name}:{flaw.line}" if flaw.line else "the end"
        screen.print(Text(f"  {place}: {flaw.kind}: {flaw.text}", style="red"))
    for line in report.gaps:
        fate = "sealed late" if line.event == Event.LATE else "lost"
        told = f"{line.lines} {fate}, as the log itself says: {_plain(line.why)}"
        screen.print(Text(f"  {_time(line.ts)}: {told}", style="yellow"))
    screen.print()


def _notes(file: FileReport) -> list[Text]:
    notes = [Text(f"  {file.name}:{flaw.line}: {flaw.kind}: {_plain(flaw.text)}", style="red") for flaw in file.flaws]
    if file.flaws_more:
        notes.append(Text(f"  {file.name}: and {file.flaws_more:,} more", style="red"))
    if file.unfinished_bytes:
        notes.append(Text(f"  {file.name}: the last {file.unfinished_bytes} bytes have no seal yet", style="dim"))
    return notes


def tail(root: Path, count: int, as_json: bool, screen: Console) -> int:
    """Print the last lines of all chains by time. Raises `UserError`."""
    lines: list[tuple[AuditLine, bytes]] = []
    try:
        for folder in chains(root):
            lines += _last(folder, count)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}.") from error
    lines = sorted(lines, key=lambda pair: pair[0].ts)[-count:]
    if as_json:
        for _, raw in lines:
            print(raw.decode())
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in TAIL_COLUMNS:
        table.add_column(name, no_wrap=True)
    for line, _ in lines:
        table.add_row(*(Text(_plain(cell)) for cell in _cells(line)))
    screen.width = max(screen.width, TAIL_CHARS_MAX)  # nothing of a log is cut
    screen.print(table)
    return 0


def _last(folder: Path, count: int) -> list[tuple[AuditLine, bytes]]:
    """The last lines of a chain; what is no line is left out."""
    found: list[tuple[AuditLine, bytes]] = []
    for _, path in reversed(numbered(folder, STEM, SUFFIX)):
        with path.open("rb") as file:
            raws = (raw.rstrip(b"\n") for raw in file)
            newest = deque((raw for raw in raws if unseal(raw) is None), maxlen=count - len(found))
        pairs = [(line, raw) for raw in newest if (line := audit_line(raw)) is not None]
        found = pairs + found
        if len(found) >= count:
            break
    return found


def _cells(line: AuditLine) -> tuple[str, ...]:
    if line.event != Event.REQUEST:
        return (_time(line.ts), *[""] * 6, f"{line.event}: {line.why}", *[""] * 3)
    tokens = f"{line.prompt_tokens}+{line.completion_tokens}"
    return (
        _time(line.ts), line.tenant, line.key, line.client, line.model, line.revision, line.replica, line.code,
        str(line.ms), tokens, line.request_id,
    )  # fmt: skip


def _time(ts: float | None) -> str:
    if ts is None:
        return "-"
    try:
        return datetime.fromtimestamp(ts, UTC).isoformat(" ", "milliseconds")[:-6]
    except (OverflowError, ValueError, OSError):  # a line that somebody changed may say anything
        return "?"


def _plain(text: str) -> str:
    """Without what a terminal would obey: names come from clients."""
    return "".join(c if c.isprintable() else "?" for c in text)
