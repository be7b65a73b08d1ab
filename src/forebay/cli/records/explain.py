"""`forebay explain`: the decision records of one request."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from forebay.cli.settings import UserError
from forebay.gateway.records.writer import RecordLog, folders, numbered
from forebay.wire.records import Candidate, Decision, candidates, decisions, payloads

SHOWN_MAX = 20
"""A client may use one id often: the newest are shown."""
CANDIDATE_COLUMNS = (
    "", "replica", "gen", "state", "load", "queue", "prefill", "decode", "price", "kv", "handicap", "total", "hit",
)  # fmt: skip


def find(root: Path, request_id: str) -> tuple[list[tuple[str, Decision]], int]:
    """The records of a request with their gateways, oldest first, and how many stretches could not be read."""
    wanted = request_id.encode()
    found, damaged = [], 0
    for folder in folders(root):
        for _, path in numbered(folder, RecordLog.STEM, RecordLog.SUFFIX):
            content = path.read_bytes()
            if wanted not in content:
                continue
            read = payloads(content)
            damaged += read.damaged
            for payload in read.whole:
                for record in decisions(payload) if wanted in payload else ():
                    if record.request_id == request_id:
                        found.append((folder.name, record))
    return sorted(found, key=lambda pair: pair[1].ts)[-SHOWN_MAX:], damaged


def explain(root: Path, request_id: str, as_json: bool, screen: Console) -> int:
    """Print the records of a request. Raises `UserError` if there is none."""
    try:
        found, damaged = find(root, request_id)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}.") from error
    if not found:
        hint = f" {damaged} damaged stretches could not be read." if damaged else ""
        raise UserError(
            f"There is no record of {request_id}. A request is on record a second after it has ended; the oldest "
            f"records are removed (gateway.records.decision_files_max).{hint}"
        )
    if as_json:
        document = [document_of(gateway, record) for gateway, record in found]
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        screen.print(Group(*(part for gateway, record in found for part in view(gateway, record))))
    return 0


def document_of(gateway: str, record: Decision) -> dict[str, Any]:
    """A record as plain data."""
    document = msgspec.structs.asdict(record)
    document["candidates"] = [msgspec.structs.asdict(row) for row in candidates(record.candidates)]
    document["attempts"] = [msgspec.structs.asdict(row) for row in record.attempts]
    return {"gateway": gateway, **document}


def view(gateway: str, record: Decision) -> Iterator[RenderableType]:
    """A record for people."""
    at = datetime.fromtimestamp(record.ts, UTC).isoformat(" ", "milliseconds")
    good = "green" if record.code == "ok" else "bold red"
    yield Text.assemble((record.request_id, "bold"), f"  {at}  {gateway}")
    yield Text.assemble("outcome   ", (record.code, good), f" ({record.status}) after {_seconds(record.total_s)}")
    tenant = f", tenant {record.tenant}" if record.tenant else ""
    asked = f", asked for as {record.asked}" if record.asked else ""
    yield Text(f"model     {record.model}{asked}{tenant}")
    yield Text(
        f"chosen    {record.chosen or 'no replica'}: {record.why or 'it was not routed'} ({record.policy or '-'})"
    )
    yield Text(
        f"times     queued {_queued(record)}, first token {_seconds(record.ttft_s)}, "
        f"load report {_seconds(record.report_age_s)} old"
    )
    counted = ", counted by the gateway" if record.estimated else ""
    yield Text(
        f"tokens    {record.prompt_tokens} prompt ({record.cached_tokens} cached), "
        f"{record.completion_tokens} completion{counted}"
    )
    if record.resumed:
        yield Text(f"resumed   {record.resumed} times on another replica")
    found = candidates(record.candidates)
    if found:
        yield Text()
        yield _candidates(record, found)
    if record.attempts:
        yield Text()
        yield _attempts(record)
    yield Text()


def _candidates(record: Decision, found: list[Candidate]) -> Table:
    table = _table(*CANDIDATE_COLUMNS)
    for c in sorted(found, key=lambda c: c.total_s):
        chosen = c.replica == record.chosen
        terms = (c.queue_s, c.prefill_s, c.decode_s, c.price_s, c.kv_s)
        cells = [
            "→" if chosen else "", c.replica, str(c.generation), c.state, f"{c.load}/{c.room}",
            *map(_seconds, terms), f"{c.handicap:.3g}x", _seconds(c.total_s),
            f"{c.hit_tokens:g} {record.hit if chosen else ''}".rstrip(),
        ]  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells), style="bold" if chosen else "")
    if record.others:
        table.add_row("", Text(f"and {record.others} more"))
    return table


def _attempts(record: Decision) -> Table:
    table = _table("attempt", "replica", "why", "outcome", "after")
    for number, attempt in enumerate(record.attempts, 1):
        cells = (str(number), attempt.replica, attempt.why, attempt.outcome, _seconds(attempt.seconds))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _queued(record: Decision) -> str:
    """How long it waited to be sent; that was no time at all for one that was, and is not known of others."""
    return "0 ms" if record.attempts and not record.queued_s else _seconds(record.queued_s)


def _seconds(value: float) -> str:
    return "-" if not value else f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
