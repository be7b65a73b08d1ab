"""`forebay usage`: what the ledgers of all gateways add up to."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.cli.settings import WRONG_USAGE, UserError
from forebay.cli.view.table import NARROW, table, telling
from forebay.gateway.records.ledger import DAY_S, Key, day_text
from forebay.gateway.records.ledger import usage as usage_of
from forebay.gateway.records.saved import Sums
from forebay.gateway.records.writer import folders
from forebay.obs.clock import wall_s

COLUMNS = (
    "tenant", "model", "requests", "ok", "cancelled", "failed", "refused", "prompt", "cached", "completion",
    "estimated",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for; None: all."""

    tenant: str | None = None
    model: str | None = None
    since: str | None = None


def first_day(since: str | None, today: int) -> int:
    """The first day that counts, in days since the epoch. Raises `UserError`."""
    if since is None:
        return 0
    days = re.fullmatch(r"([1-9]\d{0,4})d", since)
    if days:
        return today - int(days[1]) + 1
    try:
        return int(datetime.strptime(since, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()) // DAY_S
    except ValueError:
        raise UserError(
            f"--since {since!r}: expected days such as 7d, or a date such as 2026-01-31", WRONG_USAGE
        ) from None


def collect(root: Path, wanted: Wanted) -> dict[tuple[int, Key], Sums]:
    """The sums by day (days since the epoch) and key over all gateways. Raises `UserError`."""
    begin = first_day(wanted.since, int(wall_s() // DAY_S))
    total: dict[tuple[int, Key], Sums] = {}
    try:
        for folder in folders(root):
            for (day, key), sums in usage_of(folder, begin).items():
                if wanted.tenant in (None, key[0]) and wanted.model in (None, key[1]):
                    total.setdefault((day, key), Sums()).add(sums)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}.") from error
    return total


def usage(root: Path, wanted: Wanted, as_json: bool, screen: Console) -> int:
    """Print the usage. Raises `UserError`."""
    total = collect(root, wanted)
    if as_json:
        rows = [
            {
                "day": day_text(day),
                "tenant": key[0],
                "model": key[1],
                "outcome": key[2],
                **msgspec.structs.asdict(sums),
            }
            for (day, key), sums in sorted(total.items())
        ]
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        screen.print(view(total, narrow=screen.width < NARROW))
    return 0


def view(total: dict[tuple[int, Key], Sums], narrow: bool = False) -> Table:
    """The usage for people: a row for each tenant and model; if `narrow`, without counts that are 0 for all."""
    rows: list[list[str]] = []
    by_name: dict[tuple[str, str], dict[str, Sums]] = {}
    for (_, (tenant, model, outcome)), sums in total.items():
        by_name.setdefault((tenant, model), {}).setdefault(outcome, Sums()).add(sums)
    for (tenant, model), by_outcome in sorted(by_name.items()):
        whole = Sums()
        for sums in by_outcome.values():
            whole.add(sums)
        ok, cancelled, refused = (by_outcome.get(o, Sums()).requests for o in ("ok", "cancelled", "client"))
        failed = whole.requests - ok - cancelled - refused
        counts = (whole.requests, ok, cancelled, failed, refused)
        tokens = (whole.prompt_tokens, whole.cached_tokens, whole.completion_tokens, whole.estimated)
        rows.append([tenant or "-", model or "-", *(f"{count:,}" for count in (*counts, *tokens))])
    columns, rows = telling(COLUMNS, rows, always=4 if narrow else len(COLUMNS))
    shown = table(*columns, right=COLUMNS[2:])
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown
