"""`forebay usage`: totals of the ledgers of all gateways."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.cli.settings import WRONG_USAGE, UserError
from forebay.cli.view.table import NARROW, table, without_empty
from forebay.control.api.recorded import UsageRow
from forebay.gateway.records.saved import DAY_S
from forebay.obs.clock import wall_s
from forebay.wire.admin_request import UsageRequest

if TYPE_CHECKING:
    from forebay.cli.records.reading import RecordFiles
    from forebay.cli.records.remote import RemoteRecords

COLUMNS = (
    "tenant", "model", "requests", "ok", "cancelled", "failed", "refused", "prompt", "cached", "completion",
    "estimated",
)  # fmt: skip
SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens", "estimated")
"""The fields summed in the last columns."""


def first_day(since: str | None) -> int:
    """The first day to count, in days since the epoch. Raises `UserError`."""
    if since is None:
        return 0
    today = int(wall_s() // DAY_S)
    days = re.fullmatch(r"([1-9]\d{0,4})d", since)
    if days:
        return today - int(days[1]) + 1
    try:
        return int(datetime.strptime(since, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()) // DAY_S
    except ValueError:
        raise UserError(
            f"--since {since!r}: expected days such as 7d, or a date such as 2026-01-31", WRONG_USAGE
        ) from None


def usage(records: "RecordFiles | RemoteRecords", wanted: UsageRequest, as_json: bool, screen: Console) -> int:
    """Print the usage. Raises `UserError`, OSError."""
    rows = records.usage(wanted).rows
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        screen.print(view(rows, narrow=screen.width < NARROW))
    return 0


def view(used: Iterable[UsageRow], narrow: bool = False) -> Table:
    """A table with a row per tenant and model; if `narrow`, without columns that are 0 everywhere."""
    rows: list[list[str]] = []
    by_name: dict[tuple[str, str], list[UsageRow]] = {}
    for each in used:
        by_name.setdefault((each.tenant, each.model), []).append(each)
    for (tenant, model), own in sorted(by_name.items()):
        requests = sum(each.requests for each in own)
        ok, cancelled, refused = (
            sum(each.requests for each in own if each.outcome == outcome) for outcome in ("ok", "cancelled", "client")
        )
        counts = (requests, ok, cancelled, requests - ok - cancelled - refused, refused)
        tokens = (sum(getattr(each, name) for each in own) for name in SUMMED)
        rows.append([tenant or "-", model or "-", *(f"{count:,}" for count in (*counts, *tokens))])
    columns, rows = without_empty(COLUMNS, rows, always=4 if narrow else len(COLUMNS))
    shown = table(*columns, right=COLUMNS[2:])
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown
