"""Reads the records of all gateways of a cluster, for commands and for the admin API."""

import math
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from forebay.cli import settings
from forebay.cli.running.address import running
from forebay.cli.settings import UserError
from forebay.control.api.recorded import (
    AttemptDocument,
    AuditTail,
    AuditVerified,
    CandidateDocument,
    ChainDocument,
    DecisionDocument,
    Decisions,
    FileDocument,
    FlawDocument,
    Still,
    Usage,
    UsageRow,
)
from forebay.control.plan import Places
from forebay.gateway.records.audit import STEM, SUFFIX
from forebay.gateway.records.ledger import Key
from forebay.gateway.records.ledger import usage as usage_of
from forebay.gateway.records.saved import Sums, day_text
from forebay.gateway.records.verifying import ChainReport, has_chain, verify_all
from forebay.gateway.records.writer import RecordLog, folders, numbered
from forebay.wire.admin_request import UsageRequest
from forebay.wire.records import (
    AuditLine,
    Decision,
    Flaw,
    audit_line,
    candidates,
    decisions,
    is_witness,
    payloads,
    unseal,
)

T = TypeVar("T")
SHOWN_MAX = 20
"""A client may reuse a request id: only the newest records are shown."""


def never_cancelled() -> None:
    """The default: never cancelled."""


@dataclass(frozen=True, slots=True)
class RecordFiles:
    """The records below a folder, which has one folder per gateway. Every method raises OSError."""

    root: Path

    @property
    def place(self) -> str:
        """The folder, for messages."""
        return str(self.root)

    def decisions(self, request_id: str, still: Still = never_cancelled) -> Decisions:
        """The newest records of a request, oldest first."""
        wanted, found, damaged = request_id.encode(), list[DecisionDocument](), 0
        for folder in folders(self.root):
            for _, path in numbered(folder, RecordLog.STEM, RecordLog.SUFFIX):
                still()
                content = path.read_bytes()
                if wanted not in content:
                    continue
                read = payloads(content)
                damaged += read.damaged
                for payload in read.whole:
                    for record in decisions(payload) if wanted in payload else ():
                        if record.request_id == request_id:
                            found.append(_decision(folder.name, record))
        return Decisions(tuple(sorted(found, key=lambda each: each.ts)[-SHOWN_MAX:]), damaged)

    def usage(self, wanted: UsageRequest, still: Still = never_cancelled) -> Usage:
        """Usage by day, tenant, model and outcome."""
        total: dict[tuple[int, Key], Sums] = {}
        for folder in folders(self.root):
            still()
            for (day, key), sums in usage_of(folder, wanted.day_first).items():
                if wanted.tenant in (None, key[0]) and wanted.model in (None, key[1]):
                    total.setdefault((day, key), Sums()).add(sums)
        return Usage(tuple(_row(day, key, sums) for (day, key), sums in sorted(total.items())))

    def tail(self, last: int, bytes_max: int | None = None, still: Still = never_cancelled) -> AuditTail:
        """The newest lines of all chains, by time."""
        chains, room = list(filter(has_chain, folders(self.root))), math.inf if bytes_max is None else bytes_max
        found = [pair for folder in chains for pair in _last(folder, last, room, still)]
        newest = deque(sorted(found, key=lambda pair: pair[0].ts)[-last:])
        wanted, size = len(newest), sum(len(raw) for _, raw in newest)
        while size > room:
            size -= len(newest.popleft()[1])
        lines = tuple(msgspec.Raw(raw) for _, raw in newest)
        return AuditTail(tuple(folder.name for folder in chains), lines, cut=len(newest) < wanted)

    def verify(self, archived: bool, still: Still = never_cancelled) -> AuditVerified:
        """The result of verifying all chains, including missing ones."""
        reports = verify_all(self.root, archived=archived, check_cancelled=still)
        return AuditVerified(all(report.ok for report in reports), tuple(_chain(report) for report in reports))


def _decision(gateway: str, record: Decision) -> DecisionDocument:
    values = msgspec.structs.asdict(record)
    values["candidates"] = tuple(_as(CandidateDocument, each) for each in candidates(record.candidates))
    values["attempts"] = tuple(_as(AttemptDocument, each) for each in record.attempts)
    return DecisionDocument(gateway=gateway, **values)


def _as(kind: type[T], value: msgspec.Struct) -> T:
    return kind(**msgspec.structs.asdict(value))


def _row(day: int, key: Key, sums: Sums) -> UsageRow:
    return UsageRow(day_text(day), *key, **msgspec.structs.asdict(sums))


def _last(folder: Path, last: int, room: float, still: Still) -> list[tuple[AuditLine, bytes]]:
    """The last lines of a chain, up to the one that makes them longer than `room`.

    Invalid lines, and witness lines about other chains, are left out.
    """
    found: list[tuple[AuditLine, bytes]] = []
    for _, path in reversed(numbered(folder, STEM, SUFFIX)):
        still()
        newest, size = deque[bytes](), 0
        with path.open("rb") as file:
            for raw in (line.rstrip(b"\n") for line in file):
                if unseal(raw) is not None or is_witness(raw):
                    continue
                newest.append(raw)
                size += len(raw)
                while len(newest) > last - len(found) or size - len(newest[0]) > room:
                    size -= len(newest.popleft())
        found[:0] = [(line, raw) for raw in newest if (line := audit_line(raw)) is not None]
        room -= size
        if len(found) >= last or room < 0:
            break
    return found


def _chain(report: ChainReport) -> ChainDocument:
    files = tuple(
        FileDocument(
            name=each.name,
            lines=each.lines,
            first=each.first,
            last=each.last,
            flaws=_flaws(each.flaws),
            flaws_more=each.flaws_more,
            unfinished_bytes=each.unfinished_bytes,
        )
        for each in report.files
    )
    return ChainDocument(report.ok, report.chain, report.head, files, _flaws(report.flaws), tuple(report.gaps))


def _flaws(flaws: Iterable[Flaw]) -> tuple[FlawDocument, ...]:
    return tuple(FlawDocument(*flaw) for flaw in flaws)


def records_folder(file: Path | None) -> Path:
    """The records folder of the cluster of a file, else of ./forebay.yaml, else of the only cluster, or the only
    running one.

    Raises `UserError`.
    """
    runs = settings.home() / "run"
    found = sorted(path for path in runs.glob("*/records") if path.is_dir())
    source = settings.read_file(file)
    if not source.is_demo:
        wanted = Places(runs / settings.load_cluster(source, [], os.environ).name).records
        found = [wanted] if wanted in found else found[:0]
    if not found:
        raise UserError(f"There are no records below {runs} yet: gateways write them as they serve requests.")
    if len(found) > 1:
        there = running(settings.home())
        found = [path for path in found if path.parent.name in there] or found
    if len(found) > 1:
        raise UserError("\n".join(["Several clusters have records. Choose one with --folder:", *map(str, found)]))
    return found[0]
