"""Implementation of the commands on scaling: one request each."""

from collections.abc import Mapping
from urllib.parse import quote

from rich.text import Text

from forebay.cli import settings
from forebay.cli.deploy.client import Admin
from forebay.cli.deploy.work import print_json
from forebay.cli.scale import view
from forebay.cli.settings import UserError
from forebay.control.api.documents import ScalingDocument, Scalings

PATH = "/v1/scaling"


def status(admin: Admin, model: str | None, *, as_json: bool) -> int:
    """All models in a table, or one."""
    found = admin.get(PATH, Scalings)
    shown = tuple(each for each in found.models if model in (None, each.model))
    if not shown:
        there = ", ".join(each.model for each in found.models)
        raise UserError(f"There is no model {model}; there is: {there}.")
    if as_json:
        print_json(Scalings(shown, found.limits))
    else:
        settings.screen().print(view.overview(shown, found.limits))
    return 0


def explain(admin: Admin, model: str, last: int, *, everything: bool, as_json: bool) -> int:
    """All details of one model."""
    found = admin.get(_path(model), ScalingDocument)
    if as_json:
        print_json(found)
    else:
        settings.screen().print(view.explained(found, last, everything=everything))
    return 0


def change(admin: Admin, model: str, override: Mapping[str, int | None] | None, why: str, *, as_json: bool) -> int:
    """Set overrides; None: remove them."""
    given = {name: value for name, value in (override or {}).items() if value is not None}
    if override is not None and not given:
        raise UserError("Give a number of replicas, --min or --max; `forebay scale auto MODEL` removes overrides.")
    done = admin.send("PUT", _path(model), ScalingDocument, {**given, "why": why})
    if as_json:
        print_json(done)
        return 0
    screen = settings.screen()
    screen.print(view.overview((done,)))
    if done.trouble:
        screen.print(Text(f"Applied, but not stored yet: {done.trouble}", "yellow"), soft_wrap=True)
    return 0


def _path(model: str) -> str:
    return f"{PATH}/{quote(model, safe='')}"
