"""Whether the audit logs of a cluster are whole: each by itself, and by what the others have seen of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from forebay.gateway.records.audit import STEM, SUFFIX
from forebay.gateway.records.saved import counted_to, held_chain, read_head
from forebay.gateway.records.writer import folders, numbered
from forebay.wire.records import AuditLine, Event, Flaw, Head, Kind, Verifier, audit_line, is_witness, unseal

FLAWS_MAX: Final = 100
"""More flaws of one file are counted, not listed."""
Still = Callable[[], None]
"""Called before each file; may raise to end it."""


def go_on() -> None:
    """Nothing ends it."""


@dataclass(slots=True)
class FileReport:
    """What verifying found in one file. Times are seconds since the epoch, None if no line could be read."""

    name: str
    lines: int = 0
    first: float | None = None
    last: float | None = None
    flaws: list[Flaw] = field(default_factory=list)
    flaws_more: int = 0
    """Flaws beyond `FLAWS_MAX`."""
    unfinished_bytes: int = 0
    """At the end of the newest file, without a seal: what is being written, or was when the gateway was killed."""


@dataclass(slots=True)
class ChainReport:
    """What verifying found in one chain. `flaws` are those that belong to no file."""

    chain: str
    head: Head | None
    files: list[FileReport] = field(default_factory=list)
    flaws: list[Flaw] = field(default_factory=list)
    gaps: list[AuditLine] = field(default_factory=list)
    """Lines that were lost, or sealed late, as the log itself says."""

    @property
    def ok(self) -> bool:
        """Whether nothing was changed or removed."""
        return not self.flaws and not any(report.flaws for report in self.files)


class _Checked(NamedTuple):
    report: ChainReport
    verifier: Verifier


def has_chain(folder: Path) -> bool:
    """Whether a folder holds a chain, or what is left of one. Raises OSError."""
    return read_head(folder) is not None or bool(numbered(folder, STEM, SUFFIX))


def verify_all(root: Path, *, archived: bool = False, still: Still = go_on) -> list[ChainReport]:
    """Check the chains of all gateways, which may grow meanwhile. Raises OSError.

    What a chain says of another one counts if it was said before that was read, so that none seems cut short.
    `archived`: the oldest files, or whole folders, were moved elsewhere on purpose.
    """
    seen = _seen(root, still)
    checked: dict[str, _Checked] = {}
    for folder in folders(root):
        if held_chain(folder) or has_chain(folder):
            wanted = frozenset(seen.get(folder.name, ()))
            checked[folder.name] = _check(folder, wanted, archived=archived, still=still)
    missing: dict[str, ChainReport] = {}
    for by, (_, verifier) in checked.items():
        told: set[str] = set()
        for line in reversed(verifier.witnessed):
            name = line.other
            if name in told or line.other_seq not in seen.get(name, ()):
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
                told.add(name)
                report.flaws.append(flaw)
    reports = [report for report, _ in checked.values()] + list(missing.values())
    return sorted(reports, key=lambda report: report.chain)


def verify(folder: Path, *, archived: bool = False, still: Still = go_on) -> ChainReport:
    """Check one chain by itself, which may grow meanwhile. Raises OSError.

    `archived`: the oldest files were moved elsewhere on purpose, begin with what is here.
    """
    return _check(folder, frozenset(), archived=archived, still=still).report


def _check(folder: Path, wanted: frozenset[int], *, archived: bool, still: Still) -> _Checked:
    counted = counted_to(folder)  # first of all: the lines that it names are in the files by now
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
        still()
        report.files.append(_verify_file(path, verifier, newest=number == files[-1][0]))
    report.flaws = verifier.finish()
    report.gaps = verifier.gaps
    if counted > verifier.reach and all(flaw.line for flaw in report.flaws):
        text = f"the ledger has counted line {counted} of the chain, which ends with line {verifier.reach}"
        report.flaws.append(Flaw(Kind.MISSING, 0, text))
    return _Checked(report, verifier)


def _seen(root: Path, still: Still) -> dict[str, set[int]]:
    """Which lines of which chains the others speak of. Whether they are as they were written, verifying tells."""
    found: dict[str, set[int]] = {}
    for folder in folders(root):
        for _, path in numbered(folder, STEM, SUFFIX):
            still()
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
