"""The commands on API keys of tenants and of the admin API. Their implementation is imported when they run."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.options import JsonOption, StoreOptions, with_fields
from forebay.cli.settings import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from forebay.cli.keys.work import Keys
    from forebay.control.api.documents import NewKeyDocument

keys = typer.Typer(help="API keys of tenants and of the admin API.", no_args_is_help=True)

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DURATION_S_MAX = 100 * 365 * 86_400
"""Upper limit, so that expiry dates can be displayed."""
DURATION = re.compile(r"([1-9]\d{0,8})([smhd])")

IdArgument = Annotated[str, typer.Argument(metavar="KEYID", help="Key id: the part after `fb-`.")]


def duration_s(text: str, option: str) -> int:
    """Seconds of `90d`, `12h`, `30m` or `45s`. Raises `UserError`."""
    found = DURATION.fullmatch(text)
    if found is None:
        raise UserError(f"{option} {text!r}: expected a duration such as 90d, 12h, 30m or 45s", WRONG_USAGE)
    seconds = int(found[1]) * UNITS_S[found[2]]
    if seconds > DURATION_S_MAX:
        raise UserError(f"{option} {text!r}: at most 100 years", WRONG_USAGE)
    return seconds


@keys.command()
@with_fields(api=StoreOptions)
def create(
    *,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant of the cluster file that the key belongs to.", show_default=False)
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help="Create a key of the admin API instead, with this role: viewer, operator or admin.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="With --admin: name of the key's holder, as shown in the history.",
            show_default="your account's name",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Lifetime, such as 90d or 12h.", show_default="for ever"),
    ] = None,
    api: StoreOptions,
) -> None:
    """Create an API key. It is shown only once: just its digest is stored."""
    from forebay.cli.registry.command import account

    if (tenant is None) == (admin is None):
        raise UserError(
            "Give either --tenant NAME (a tenant's key) or --admin ROLE (a key of the admin API).", WRONG_USAGE
        )
    expires_s = duration_s(expires, "--expires") if expires else None
    if admin is not None:
        _check_holder(admin, name or account())
    opened = _opened(api)
    _show(opened.create(tenant or name or account(), admin or "", expires_s))
    if admin is not None and not opened.required:
        typer.echo("The admin API requires keys once the cluster file has `admin: {auth: keys}`.", err=True)


@keys.command("list")
@with_fields(api=StoreOptions)
def list_(
    as_json: JsonOption = False,
    *,
    api: StoreOptions,
) -> None:
    """List keys with their holder, creation and expiry. The keys themselves are never shown."""
    from forebay.cli.keys import view

    view.listed(_opened(api).all(), as_json)


@keys.command()
@with_fields(api=StoreOptions)
def revoke(key_id: IdArgument, *, api: StoreOptions) -> None:
    """Revoke a key for good. Gateways refuse it within a second, the admin API at once."""
    _opened(api).revoke(key_id)
    typer.echo(f"Key {key_id} is revoked.")


@keys.command()
@with_fields(api=StoreOptions)
def rotate(
    key_id: IdArgument,
    overlap: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Keep the old key valid for this long.", show_default="revoked at once"),
    ] = None,
    *,
    api: StoreOptions,
) -> None:
    """Create a new key with the holder and lifetime of an old one, and revoke the old one."""
    from forebay.cli.keys.view import time

    overlap_s = duration_s(overlap, "--overlap") if overlap else 0
    made = _opened(api).rotate(key_id, overlap_s)
    _show(made)
    until = f"stays valid until {time(made.made.created_at + overlap_s)} at most" if overlap else "is revoked"
    typer.echo(f"Key {key_id} {until}.", err=True)


def _opened(api: StoreOptions) -> "Keys":
    """The keys of the cluster file; with a URL or a key file, those behind an admin API."""
    from forebay.cli.keys import work

    return work.remote_keys(api.admin()) if api.through_api else work.local_keys(api.file)


def _check_holder(role: str, holder: str) -> None:
    """Raises `UserError` for an invalid role or holder."""
    from forebay.core.registry.approval import Role
    from forebay.core.tenancy.roles import HOLDER, role_of

    if role_of(role) is None:
        there = ", ".join(each.name.lower() for each in Role)
        raise UserError(f"--admin {role!r}: expected a role: {there}.", WRONG_USAGE)
    if HOLDER.fullmatch(holder) is None:
        raise UserError(f"--name {holder!r}: expected up to 64 letters, digits, and . _ @ + -", WRONG_USAGE)


def _show(new: "NewKeyDocument") -> None:
    """Print only the key on standard output, for scripts; the rest goes to standard error."""
    from forebay.cli.keys.view import time

    made = new.made
    until = f", valid until {time(made.expires_at)}" if made.expires_at else ""
    whose = f"{made.name} for the admin API ({made.role})" if made.role else f"tenant {made.tenant}"
    typer.echo(f"Key {made.id} of {whose}{until}. It is shown only once; store it safely:", err=True)
    typer.echo(new.key)
