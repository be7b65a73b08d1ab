"""The command `sla`; its implementation is imported when it runs."""

import re
from typing import Annotated

import typer

from forebay.cli import settings
from forebay.cli.options import AdminOptions, JsonOption, ModelArgument, with_fields
from forebay.cli.settings import WRONG_USAGE, UserError

UNITS = {"h": 3600, "d": 86_400}


@with_fields(api=AdminOptions)
def sla(
    model: ModelArgument = None,
    *,
    period: Annotated[str, typer.Option(help="Period up to now, in hours or days, such as 12h or 30d.")] = "30d",
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Show the expected and the delivered availability of models, and the error budget left."""
    from forebay.cli.sla.view import show

    raise typer.Exit(show(api.admin(), model, seconds(period), as_json, settings.screen()))


def seconds(period: str) -> int:
    """A period in seconds. Raises `UserError`."""
    found = re.fullmatch(r"([1-9]\d{0,4})([hd])", period)
    if found is None:
        raise UserError(f"--period {period!r}: expected hours or days, such as 12h or 30d", WRONG_USAGE)
    return int(found[1]) * UNITS[found[2]]
