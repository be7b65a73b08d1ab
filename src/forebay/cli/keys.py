"""`forebay keys`: makes, lists, revokes and replaces the API keys of a cluster's tenants."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from forebay.cli import settings
from forebay.cli.settings import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from forebay.core.cluster import Cluster
    from forebay.core.tenancy import KeyRecord
    from forebay.registry.keys import Keys

    Made = tuple[str, KeyRecord]

T = TypeVar("T")

keys = typer.Typer(help="API keys of the tenants.", no_args_is_help=True)

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DURATION_S_MAX = 100 * 365 * 86_400
"""A longer time ends in no year that can be shown."""
DURATION = re.compile(r"([1-9]\d{0,8})([smhd])")

FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Cluster file.", show_default="./forebay.yaml"),
]
IdArgument = Annotated[str, typer.Argument(metavar="KEYID", help="Id of the key: the part after `fb-`.")]


def duration_s(text: str, option: str) -> int:
    """Seconds of `90d`, `12h`, `30m` or `45s`. Raises `UserError`."""
    found = DURATION.fullmatch(text)
    if found is None:
        raise UserError(f"{option} {text!r}: expected a time such as 90d, 12h, 30m or 45s", WRONG_USAGE)
    seconds = int(found[1]) * UNITS_S[found[2]]
    if seconds > DURATION_S_MAX:
        raise UserError(f"{option} {text!r}: at most a hundred years", WRONG_USAGE)
    return seconds


@keys.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose key it is: a tenant of the cluster file.")],
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Good for so long, such as 90d or 12h.", show_default="for ever"),
    ] = None,
    file: FileOption = None,
) -> None:
    """Make an API key. It is shown once: only its digest is kept."""
    from forebay.obs.clock import wall_s

    cluster, path = _cluster(file)
    names = [each.name for each in cluster.tenants]
    if tenant not in names:
        there = ", ".join(names) or "none; add it under `tenants:` and set `gateway.auth: keys`"
        raise UserError(f"There is no tenant {tenant!r} in the cluster file; there is: {there}.")
    now = wall_s()
    ends = now + duration_s(expires, "--expires") if expires else None

    def add(records: "Keys") -> "tuple[Keys, Made]":
        made = _new(records, tenant, now, ends)
        return (*records, made[1]), made

    _show(_change(path, add))


@keys.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, file: FileOption = None
) -> None:
    """Show all keys: whose they are, since when, until when. Never the keys themselves."""
    import msgspec
    from rich.table import Table

    from forebay.obs.clock import wall_s
    from forebay.registry.keys import KeyFileError, read_keys

    _, path = _cluster(file)
    try:
        records = read_keys(path)
    except KeyFileError as error:
        raise UserError(f"{error}.") from error
    now = wall_s()
    if as_json:
        rows = [
            {
                "id": record.id,
                "tenant": record.tenant,
                "state": _state(record, now),
                "created": _time(record.created),
                "expires": _time(record.expires) or None,
                "revoked": _time(record.revoked) or None,
            }
            for record in records
        ]
        typer.echo(msgspec.json.format(msgspec.json.encode(rows)))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("id", "tenant", "state", "created", "expires"):
        table.add_column(name, no_wrap=True)
    for record in records:
        ends = _time(record.expires) or "never"
        table.add_row(record.id, record.tenant, _state(record, now), _time(record.created), ends)
    settings.screen().print(table)


@keys.command()
def revoke(key_id: IdArgument, file: FileOption = None) -> None:
    """End a key for good. Gateways refuse it within a second."""
    from forebay.obs.clock import wall_s

    _, path = _cluster(file)
    now = wall_s()

    def end(records: "Keys") -> "tuple[Keys, None]":
        old = _find(records, key_id, path)
        return _with(records, replace(old, revoked=now if old.revoked is None else old.revoked)), None

    _change(path, end)
    typer.echo(f"Key {key_id} is revoked.")


@keys.command()
def rotate(
    key_id: IdArgument,
    overlap: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The old key stays good for so long.", show_default="ends at once"),
    ] = None,
    file: FileOption = None,
) -> None:
    """Make a new key for the same tenant, good for as long as the old one was, and end the old one."""
    from forebay.obs.clock import wall_s

    _, path = _cluster(file)
    now = wall_s()
    until = now + duration_s(overlap, "--overlap") if overlap else None

    def swap(records: "Keys") -> "tuple[Keys, Made]":
        old = _find(records, key_id, path)
        if _state(old, now) != "good":
            advice = f"make one with `forebay keys create --tenant {old.tenant}`"
            raise UserError(f"Key {key_id} is {_state(old, now)}: {advice}.")
        made = _new(records, old.tenant, now, None if old.expires is None else now + old.expires - old.created)
        ended = replace(old, revoked=now) if until is None else replace(old, expires=min(until, old.expires or until))
        return (*_with(records, ended), made[1]), made

    _show(_change(path, swap))
    typer.echo(f"Key {key_id} {f'stays good until {_time(until)}' if until else 'is revoked'}.", err=True)


def _new(records: "Keys", tenant: str, now: float, ends: float | None) -> "Made":
    import secrets

    from forebay.core.tenancy import ENTROPY_BYTES, mint

    taken = {record.id for record in records}
    while True:
        made = mint(tenant, secrets.token_bytes(ENTROPY_BYTES), now, ends)
        if made[1].id not in taken:
            return made


def _show(made: "Made") -> None:
    """The key alone on standard output, so that a script can take it; all else beside it."""
    key, record = made
    until = f", good until {_time(record.expires)}" if record.expires else ""
    typer.echo(f"Key {record.id} of tenant {record.tenant}{until}. It is shown this once; keep it safe:", err=True)
    typer.echo(key)


def _cluster(file: Path | None) -> "tuple[Cluster, Path]":
    """The cluster and where its keys are. Raises `UserError`."""
    from forebay.control.plan import Places, keys_path

    cluster = settings.load_cluster(settings.read_file(file), [], os.environ)
    return cluster, keys_path(cluster, Places(settings.home() / "run" / cluster.name))


def _change(path: Path, change: "Callable[[Keys], tuple[Keys, T]]") -> "T":
    from forebay.registry.keys import KeyFileError, change_keys

    try:
        return change_keys(path, change)
    except KeyFileError as error:
        raise UserError(f"{error}.") from error


def _find(records: "Keys", key_id: str, path: Path) -> "KeyRecord":
    for record in records:
        if record.id == key_id:
            return record
    raise UserError(f"There is no key {key_id!r} in {path}. `forebay keys list` shows those there are.")


def _with(records: "Keys", changed: "KeyRecord") -> "Keys":
    return tuple(changed if record.id == changed.id else record for record in records)


def _state(record: "KeyRecord", now: float) -> str:
    if record.revoked is not None:
        return "revoked"
    return "expired" if record.expires is not None and now >= record.expires else "good"


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
