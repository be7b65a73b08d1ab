"""Verifies the audit logs of a cluster: each by itself, and against what the others have recorded of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from forebay.gateway.records.audit import STEM, SUFFIX
from forebay.gateway.records.saved import counted_to, held_chain, read_head
from forebay.gateway.records.writer import folders, numbered
from forebay.wire.records import AuditLine, Event, Flaw, Head, Kind, Verifier, audit_line, is_witness, unseal

FLAWS_MAX: Final = 100
"""Further flaws of a file are counted, not listed."""
CancelCheck = Callable[[], None]
"""Called before each file; may raise to cancel."""


def never_cancelled() -> None:
    """The default: never cancelled."""


@dataclass(slots=True)
class FileReport:
    """Result for one file. Times are seconds since the epoch, None if no line could be read."""

    name: str
    lines: int = 0
    first: float | None = None
    last: float | None = None
    flaws: list[Flaw] = field(default_factory=list)
    flaws_more: int = 0
    """Number of flaws beyond `FLAWS_MAX`."""
    unfinished_bytes: int = 0
    """Unsealed bytes at the end of the newest file: still being written, or left by a killed gateway."""


@dataclass(slots=True)
class ChainReport:
    """Result for one chain. `flaws` are those that belong to no file."""

    chain: str
    head: Head | None
    files: list[FileReport] = field(default_factory=list)
    flaws: list[Flaw] = field(default_factory=list)
    gaps: list[AuditLine] = field(default_factory=list)
    """Lines about losses and late seals, from the log itself."""

    @property
    def ok(self) -> bool:
        """Whether nothing was changed or removed."""
        return not self.flaws and not any(report.flaws for report in self.files)


class _Checked(NamedTuple):
    report: ChainReport
    verifier: Verifier


def has_chain(folder: Path) -> bool:
    """Whether a folder holds a chain, or a part of one. Raises OSError."""
    return read_head(folder) is not None or bool(numbered(folder, STEM, SUFFIX))


def verify_all(
    root: Path, *, archived: bool = False, check_cancelled: CancelCheck = never_cancelled
) -> list[ChainReport]:
    """Verify the chains of all gateways, which may grow meanwhile. Raises OSError.

    A witness line counts only if it was written before the witnessed chain was read, so that no chain seems
    truncated. `archived`: the oldest files, or whole folders, were moved elsewhere on purpose.
    """
    seen = _seen(root, check_cancelled)
    checked: dict[str, _Checked] = {}
    for folder in folders(root):
        if held_chain(folder) or has_chain(folder):
            wanted = frozenset(seen.get(folder.name, ()))
            checked[folder.name] = _check(folder, wanted, archived=archived, check_cancelled=check_cancelled)
    missing: dict[str, ChainReport] = {}
    for by, (_, verifier) in checked.items():
        reported: set[str] = set()
        for line in reversed(verifier.witnessed):
            name = line.other
            if name in reported or line.other_seq not in seen.get(name, ()):
                continue
            if name in checked:
                flaw = checked[name].verifier.against(Head(line.other_seq, line.other_hash), by)
                report = checked[name].report
            elif archived:
                continue
            else:
                text = f"the whole log is gone: the chain {by} has seen line {line.other_seq} of it"
                flaw = Flaw(Kind.MISSING, 0, text)
                report = missing.setdefault(name, ChainReport(name, None))
            if flaw is not None:
                reported.add(name)
                report.flaws.append(flaw)
    reports = [report for report, _ in checked.values()] + list(missing.values())
    return sorted(reports, key=lambda report: report.chain)


def verify(folder: Path, *, archived: bool = False, check_cancelled: CancelCheck = never_cancelled) -> ChainReport:
    """Verify one chain by itself, which may grow meanwhile. Raises OSError.

    `archived`: the oldest files were moved elsewhere on purpose, so begin with the first one here.
    """
    return _check(folder, frozenset(), archived=archived, check_cancelled=check_cancelled).report


def _check(folder: Path, wanted: frozenset[int], *, archived: bool, check_cancelled: CancelCheck) -> _Checked:
    counted = counted_to(folder)  # read first: the lines that it names are in the files by now
    held = held_chain(folder)
    head = read_head(folder)
    verifier = Verifier(folder.name, head, archived=archived, wanted=wanted)
    report = ChainReport(folder.name, head)
    files = numbered(folder, STEM, SUFFIX)
    if held and head is None and not files:
        past = f"{counted} lines of it were counted" if counted else "it was kept here"
        report.flaws.append(Flaw(Kind.MISSING, 0, f"the whole log is gone: {past}"))
        return _Checked(report, verifier)
    for number, path in files:
        check_cancelled()
        report.files.append(_verify_file(path, verifier, newest=number == files[-1][0]))
    report.flaws = verifier.finish()
    report.gaps = verifier.gaps
    if counted > verifier.reach and all(flaw.line for flaw in report.flaws):
        text = f"the ledger has counted line {counted} of the chain, which ends with line {verifier.reach}"
        report.flaws.append(Flaw(Kind.MISSING, 0, text))
    return _Checked(report, verifier)


def _seen(root: Path, check_cancelled: CancelCheck) -> dict[str, set[int]]:
    """The lines of other chains that each chain has witnessed. Verification decides whether those are authentic."""
    found: dict[str, set[int]] = {}
    for folder in folders(root):
        for _, path in numbered(folder, STEM, SUFFIX):
            check_cancelled()
            with path.open("rb") as file:
                for raw in file:
                    line = audit_line(raw.rstrip(b"\n")) if is_witness(raw) else None
                    if line is not None and line.event == Event.WITNESS:
                        found.setdefault(line.other, set()).add(line.other_seq)
    return found


def _verify_file(path: Path, verifier: Verifier, *, newest: bool) -> FileReport:
    report = FileReport(path.name)
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            report.unfinished_bytes += len(raw)
            if newest and not raw.endswith(b"\n") and unseal(raw) is None:
                break
            report.lines = number
            before = verifier.last
            _note(report, verifier.feed(raw.removesuffix(b"\n"), number))
            if verifier.last is not before:
                report.unfinished_bytes = 0
                if verifier.times is not None:
                    report.first = verifier.times[0] if report.first is None else report.first
                    report.last = verifier.times[1]
    if not newest:
        report.unfinished_bytes = 0
        _note(report, verifier.end_file())
    return report


def _note(report: FileReport, flaw: Flaw | None) -> None:
    if flaw is not None and len(report.flaws) < FLAWS_MAX:
        report.flaws.append(flaw)
    elif flaw is not None:
        report.flaws_more += 1
