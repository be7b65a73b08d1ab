"""`forebay explain`: the decision records of one request."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from forebay.cli.settings import UserError
from forebay.cli.view.table import NARROW, without_empty
from forebay.control.api.recorded import CandidateDocument, DecisionDocument
from forebay.core.errors import OK
from forebay.core.routing import BATCH, INTERACTIVE

if TYPE_CHECKING:
    from forebay.cli.records.reading import RecordFiles
    from forebay.cli.records.remote import RemoteRecords

CANDIDATE_COLUMNS = (
    "", "replica", "gen", "state", "load", "queue", "prefill", "decode", "price", "kv", "handicap", "total", "hit",
)  # fmt: skip
CHARS_MAX = 160
"""Room for all figures of a candidate."""


def explain(records: "RecordFiles | RemoteRecords", request_id: str, as_json: bool, screen: Console) -> int:
    """Print the records of a request. Raises `UserError` if there is none, and OSError."""
    found = records.decisions(request_id)
    if not found.decisions:
        hint = f" {found.damaged} damaged sections could not be read." if found.damaged else ""
        raise UserError(
            f"There is no record of {request_id}. A request is recorded within a second of its end if "
            f"gateway.records.decisions is on; the oldest records are removed "
            f"(gateway.records.decision_files_max).{hint}"
        )
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found.decisions)).decode())
    else:
        narrow = screen.width < NARROW
        screen.width = max(screen.width, CHARS_MAX)  # no figure is truncated: a narrow terminal wraps the lines
        screen.print(Group(*(part for record in found.decisions for part in view(record, narrow))))
    return 0


def view(record: DecisionDocument, narrow: bool = False) -> Iterator[RenderableType]:
    """Format a record; if `narrow`, without figures that no candidate has."""
    at = datetime.fromtimestamp(record.ts, UTC).isoformat(" ", "milliseconds")
    good = "green" if record.code == OK else "bold red"
    yield Text.assemble((record.request_id, "bold"), f"  {at}  {record.gateway}")
    yield Text.assemble("outcome   ", (record.code, good), f" ({record.status}) after {_seconds(record.total_s)}")
    tenant = f", tenant {record.tenant}" if record.tenant else ""
    asked = f", requested as {record.asked}" if record.asked else ""
    dispatch = f": {record.dispatch}" if record.dispatch else ""
    yield Text(f"model     {record.model or 'none'}{asked}{dispatch}{tenant}")
    if record.band:
        deadline = f", deadline {_seconds(record.deadline_s)}" if record.deadline_s else ""
        yield Text(f"priority  {record.band}{deadline}")
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
    if record.candidates:
        yield Text()
        yield _candidates(record, narrow)
        if any(c.total_s for c in record.candidates):
            yield Text(_sum_of(record.candidates), style="dim")
    if record.attempts:
        yield Text()
        yield _attempts(record)
    yield Text()


def _candidates(record: DecisionDocument, narrow: bool) -> Table:
    rows, chosen_row = list[list[str]](), -1
    for c in sorted(record.candidates, key=lambda c: c.total_s):
        chosen = c.replica == record.chosen
        terms = (c.queue_s, c.prefill_s, c.decode_s, c.price_s, c.kv_s)
        cells = [
            "→" if chosen else "", c.replica, str(c.generation), c.state, f"{c.load}/{c.room}",
            *map(_seconds, terms), f"{c.handicap:.3g}x", _seconds(c.total_s),
            f"{c.hit_tokens:g} {record.hit if chosen else ''}".rstrip(),
        ]  # fmt: skip
        chosen_row = len(rows) if chosen else chosen_row
        rows.append(cells)
    columns, rows = without_empty(CANDIDATE_COLUMNS, rows, always=5 if narrow else len(CANDIDATE_COLUMNS))
    table = _table(*columns)
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if number == chosen_row else "")
    if record.others:
        table.add_row("", Text(f"and {record.others} more"))
    return table


def _sum_of(candidates: tuple[CandidateDocument, ...]) -> str:
    """The formula of the totals. Its weights are those of the band that the request came in, before any promotion."""

    def off_s(ttft: float, tpot: float) -> float:
        return sum(
            abs((ttft * (c.queue_s + c.prefill_s) + tpot * c.decode_s + c.price_s + c.kv_s) * c.handicap - c.total_s)
            for c in candidates
        )

    ttft, tpot, _ = min(INTERACTIVE, BATCH, key=lambda weights: off_s(weights.ttft, weights.tpot))
    reading = "queue + prefill" if ttft == 1.0 else f"{ttft:g} (queue + prefill)"
    return f"total = ({reading} + {tpot:g} decode + price + kv) x handicap"


def _attempts(record: DecisionDocument) -> Table:
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


def _queued(record: DecisionDocument) -> str:
    """Time queued. Zero is a known value only for a request that was sent."""
    return "0 ms" if record.attempts and not record.queued_s else _seconds(record.queued_s)


def _seconds(value: float) -> str:
    if not value:
        return "-"
    if value < 0.9995:  # which would be rounded to 1e+03
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:.0f} s"
