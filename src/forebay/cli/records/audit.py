"""`forebay audit`: verify the log, and show its last lines."""

from collections.abc import Collection
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.cli import settings
from forebay.cli.settings import UserError
from forebay.control.api.recorded import ChainDocument, FileDocument
from forebay.wire.records import AuditLine, Event, audit_line

if TYPE_CHECKING:
    from forebay.cli.records.reading import RecordFiles
    from forebay.cli.records.remote import RemoteRecords

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
"""Maximum width of a line; a terminal wraps it."""


def verify(records: "RecordFiles | RemoteRecords", archived: bool, as_json: bool, screen: Console) -> int:
    """Verify all chains and print the result; returns 1 if anything was changed or removed.

    Raises `UserError`, OSError.
    """
    found = records.verify(archived)
    _check_any(found.chains, records.place)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for chain in found.chains:
            _print(chain, screen)
        verdict = (
            ("No line was changed or removed.", "green") if found.ok else ("The audit log is damaged.", "bold red")
        )
        screen.print(Text(*verdict))
    return 0 if found.ok else 1


def _check_any(chains: Collection[object], place: str) -> None:
    if not chains:
        raise UserError(f"There is no audit log in {place}. Is gateway.records.audit on?")


def _print(report: ChainDocument, screen: Console) -> None:
    head = f"head {report.head.seq} {report.head.hash}" if report.head else "no head"
    screen.print(Text.assemble((_plain(report.chain), "bold"), f"  {head}"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="bold")
    for name in ("file", "lines", "first (UTC)", "last (UTC)", ""):
        table.add_column(name, justify="right" if name == "lines" else "left", no_wrap=True)
    for file in report.files:
        verdict = Text("damaged", style="bold red") if file.flaws else Text("ok", style="green")
        table.add_row(file.name, f"{file.lines:,}", _time(file.first), _time(file.last), verdict)
    if report.files:
        screen.print(table)
    for file in report.files:
        for text in _notes(file):
            screen.print(text)
    for flaw in report.flaws:
        end = "the end" if report.files or report.head else "the log"
        place = f"{report.files[0].name}:{flaw.line}" if flaw.line else end
        screen.print(Text(f"  {place}: {flaw.kind}: {_plain(flaw.text)}", style="red"))
    for line in report.gaps:
        note = f"{_fate(line)}, according to the log itself: {_plain(line.why)}"
        screen.print(Text(f"  {_time(line.ts)}: {note}", style="yellow"))
    screen.print()


def _fate(line: AuditLine) -> str:
    if line.event == Event.KILLED:
        return "some may be lost"
    return f"{line.lines} sealed late" if line.event == Event.LATE else f"{line.lines} lost"


def _notes(file: FileDocument) -> list[Text]:
    notes = [Text(f"  {file.name}:{flaw.line}: {flaw.kind}: {_plain(flaw.text)}", style="red") for flaw in file.flaws]
    if file.flaws_more:
        notes.append(Text(f"  {file.name}: and {file.flaws_more:,} more", style="red"))
    if file.unfinished_bytes:
        notes.append(Text(f"  {file.name}: the last {file.unfinished_bytes} bytes are not sealed yet", style="dim"))
    return notes


def tail(records: "RecordFiles | RemoteRecords", count: int, as_json: bool, screen: Console) -> int:
    """Print the last lines of all chains by time. Raises `UserError`, OSError."""
    found = records.tail(count)
    _check_any(found.chains, records.place)
    lines = [bytes(raw) for raw in found.lines]
    if found.cut:
        note = f"{len(lines)} of {count} lines: more would exceed the size limit of the admin API."
        settings.screen(stderr=True).print(Text(note, "yellow"))
    if as_json:
        for raw in lines:
            print(raw.decode())
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in TAIL_COLUMNS:
        table.add_column(name, no_wrap=True)
    for line in filter(None, map(audit_line, lines)):
        table.add_row(*(Text(_plain(cell)) for cell in _cells(line)))
    screen.width = max(screen.width, TAIL_CHARS_MAX)  # nothing of a log is truncated
    screen.print(table)
    return 0


def _cells(line: AuditLine) -> tuple[str, ...]:
    if line.event != Event.REQUEST:
        return (_time(line.ts), *[""] * 6, f"{line.event}: {line.why}", *[""] * 3)
    model = line.model or (f"({line.asked})" if line.asked else "")
    tokens = f"{line.prompt_tokens}+{line.completion_tokens}"
    return (
        _time(line.ts), line.tenant, line.key, line.client, model, line.revision, line.replica, line.code,
        str(line.ms), tokens, line.request_id,
    )  # fmt: skip


def _time(ts: float | None) -> str:
    if ts is None:
        return "-"
    try:
        return datetime.fromtimestamp(ts, UTC).isoformat(" ", "milliseconds")[:-6]
    except (OverflowError, ValueError, OSError):  # a tampered line may contain anything
        return "?"


def _plain(text: str) -> str:
    """Without control characters, as names come from clients."""
    return "".join(c if c.isprintable() else "?" for c in text)
