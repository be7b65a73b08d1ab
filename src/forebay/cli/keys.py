"""`forebay keys`: makes, lists, revokes and replaces API keys: of a cluster's tenants, and of its admin API.

Each kind has a file of its own; a gateway never reads that of the admin API.
"""

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

keys = typer.Typer(help="API keys: of tenants, and of the admin API.", no_args_is_help=True)

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DURATION_S_MAX = 100 * 365 * 86_400
"""A longer time ends in no year that can be shown."""
DURATION = re.compile(r"([1-9]\d{0,8})([smhd])")
HOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
"""Who has a key of the admin API, as the history names him."""

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
    tenant: Annotated[
        str | None, typer.Option(help="Whose key it is: a tenant of the cluster file.", show_default=False)
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help="A key of the admin API instead: viewer, operator or admin.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="With --admin: who has it, as the history tells.", show_default="your account's name"),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Good for so long, such as 90d or 12h.", show_default="for ever"),
    ] = None,
    file: FileOption = None,
) -> None:
    """Make an API key. It is shown once: only its digest is kept."""
    from forebay.obs.clock import wall_s

    if (tenant is None) == (admin is None):
        raise UserError("Say whose key it is with --tenant NAME, or what it may do with --admin ROLE.", WRONG_USAGE)
    cluster, paths = _cluster(file)
    if tenant is not None:
        holder, role, path = _tenant(tenant, [each.name for each in cluster.tenants]), "", paths[0]
    else:
        holder, role, path = _holder(name), _role(str(admin)), paths[1]
    now = wall_s()
    ends = now + duration_s(expires, "--expires") if expires else None

    def add(records: "Keys") -> "tuple[Keys, Made]":
        made = _new(records, holder, now, ends, role)
        return (*records, made[1]), made

    _show(_change(path, add))
    if role and cluster.admin.auth != "keys":
        typer.echo("The admin API asks for keys once the cluster file has `admin: {auth: keys}`.", err=True)


@keys.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, file: FileOption = None
) -> None:
    """Show all keys: whose they are, since when, until when. Never the keys themselves."""
    import msgspec
    from rich.table import Table

    from forebay.obs.clock import wall_s

    _, paths = _cluster(file)
    records = [record for path in dict.fromkeys(paths) for record in _read(path)]
    now = wall_s()
    if as_json:
        rows = [
            {
                "id": record.id,
                "tenant": None if record.role else record.tenant,
                "name": record.tenant if record.role else None,
                "role": record.role or None,
                "state": _state(record, now),
                "created": _time(record.created),
                "expires": _time(record.expires) or None,
                "revoked": _time(record.revoked) or None,
            }
            for record in records
        ]
        typer.echo(msgspec.json.format(msgspec.json.encode(rows)))
        return
    if not records:
        typer.echo("There are no keys yet. `forebay keys create --tenant NAME` makes one.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("id", "of", "may", "state", "created", "expires"):
        table.add_column(name, no_wrap=True)
    for record in records:
        ends = _time(record.expires) or "never"
        may = f"admin API: {record.role}" if record.role else "use models"
        table.add_row(record.id, record.tenant, may, _state(record, now), _time(record.created), ends)
    settings.screen().print(table)


@keys.command()
def revoke(key_id: IdArgument, file: FileOption = None) -> None:
    """End a key for good. Gateways refuse it within a second, the admin API at once."""
    from forebay.obs.clock import wall_s

    path = _place(key_id, _cluster(file)[1])
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
    """Make a new key for the same holder, good for as long as the old one was, and end the old one."""
    from forebay.obs.clock import wall_s

    path = _place(key_id, _cluster(file)[1])
    now = wall_s()
    until = now + duration_s(overlap, "--overlap") if overlap else None

    def swap(records: "Keys") -> "tuple[Keys, Made]":
        old = _find(records, key_id, path)
        if _state(old, now) != "good":
            whose = f"--admin {old.role} --name {old.tenant}" if old.role else f"--tenant {old.tenant}"
            advice = f"make one with `forebay keys create {whose}`"
            raise UserError(f"Key {key_id} is {_state(old, now)}: {advice}.")
        ends = None if old.expires is None else now + old.expires - old.created
        made = _new(records, old.tenant, now, ends, old.role)
        ended = replace(old, revoked=now) if until is None else replace(old, expires=min(until, old.expires or until))
        return (*_with(records, ended), made[1]), made

    _show(_change(path, swap))
    typer.echo(f"Key {key_id} {f'stays good until {_time(until)}' if until else 'is revoked'}.", err=True)


def _tenant(name: str, there: list[str]) -> str:
    if name not in there:
        found = ", ".join(there) or "none; add it under `tenants:` and set `gateway.auth: keys`"
        raise UserError(f"There is no tenant {name!r} in the cluster file; there is: {found}.")
    return name


def _holder(name: str | None) -> str:
    from forebay.cli.registry.command import account

    holder = name or account()
    if HOLDER.fullmatch(holder) is None:
        raise UserError(f"--name {holder!r}: expected up to 64 letters, digits, and . _ @ + -", WRONG_USAGE)
    return holder


def _role(name: str) -> str:
    from forebay.core.registry.approval import Role
    from forebay.core.tenancy.roles import role_of

    if role_of(name) is None:
        there = ", ".join(role.name.lower() for role in Role)
        raise UserError(f"--admin {name!r}: expected a role: {there}.", WRONG_USAGE)
    return name


def _new(records: "Keys", holder: str, now: float, ends: float | None, role: str) -> "Made":
    import secrets

    from forebay.core.tenancy import ENTROPY_BYTES, mint

    taken = {record.id for record in records}
    while True:
        made = mint(holder, secrets.token_bytes(ENTROPY_BYTES), now, ends, role)
        if made[1].id not in taken:
            return made


def _show(made: "Made") -> None:
    """The key alone on standard output, so that a script can take it; all else beside it."""
    key, record = made
    until = f", good until {_time(record.expires)}" if record.expires else ""
    whose = f"{record.tenant} for the admin API ({record.role})" if record.role else f"tenant {record.tenant}"
    typer.echo(f"Key {record.id} of {whose}{until}. It is shown this once; keep it safe:", err=True)
    typer.echo(key)


def _cluster(file: Path | None) -> "tuple[Cluster, tuple[Path, Path]]":
    """The cluster, and where its keys are: those of tenants, and those of the admin API. Raises `UserError`."""
    from forebay.control.plan import Places, admin_keys_path, keys_path

    cluster = settings.load_cluster(settings.read_file(file), [], os.environ)
    places = Places(settings.home() / "run" / cluster.name)
    return cluster, (keys_path(cluster, places), admin_keys_path(cluster, places))


def _read(path: Path) -> "Keys":
    from forebay.registry.keys import KeyFileError, read_keys

    try:
        return read_keys(path)
    except KeyFileError as error:
        raise UserError(f"{error}.") from error


def _place(key_id: str, paths: tuple[Path, Path]) -> Path:
    """The file that has a key, else that of the tenants."""
    return next((path for path in paths if any(record.id == key_id for record in _read(path))), paths[0])


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
