"""The commands that read records; what they run is imported when they run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli import settings
from forebay.cli.settings import UserError

audit = typer.Typer(help="The audit log.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FolderOption = Annotated[
    Path | None,
    typer.Option(help="Folder of records.", show_default="the cluster's of ./forebay.yaml, else the only one"),
]


def records_folder(given: Path | None) -> Path:
    """The folder that is meant. Raises `UserError` if there is none, or more than one."""
    if given is not None:
        if not given.is_dir():
            raise UserError(f"{given}: no such folder.")
        return given
    from forebay.control.plan import Places

    runs = settings.home() / "run"
    found = sorted(path for path in runs.glob("*/records") if path.is_dir())
    source = settings.read_file(None)
    if not source.is_demo:
        wanted = Places(runs / settings.load_cluster(source, [], os.environ).name).records
        found = [wanted] if wanted in found else found[:0]
    if not found:
        raise UserError(f"There are no records below {runs} yet: gateways write them when they serve requests.")
    if len(found) > 1:
        raise UserError("\n".join(["Several clusters have records. Say --folder with one of:", *map(str, found)]))
    return found[0]


def explain(
    request_id: Annotated[str, typer.Argument(help="The `x-request-id` of the answer.")],
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a request was routed: every candidate with its score, the attempts, the outcome."""
    from forebay.cli.records.explain import explain

    raise typer.Exit(explain(records_folder(folder), request_id, as_json, settings.screen()))


def usage(
    *,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    since: Annotated[
        str | None, typer.Option(help="7d: the last 7 days, today (UTC) being one; or a date.", show_default="all")
    ] = None,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show requests and tokens by tenant and model."""
    from forebay.cli.records.usage import Wanted, usage

    raise typer.Exit(usage(records_folder(folder), Wanted(tenant, model, since), as_json, settings.screen()))


@audit.command()
def verify(
    folder: FolderOption = None,
    archived: Annotated[
        bool, typer.Option("--archived", help="The oldest files were moved elsewhere on purpose.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the audit log: finds changed and removed lines and files; exits with 1 if there are any.

    Who rewrites a whole log with its head leaves no trace in it: keep the printed head elsewhere from time to time.
    """
    from forebay.cli.records.audit import verify

    raise typer.Exit(verify(records_folder(folder), archived, as_json, settings.screen()))


@audit.command()
def tail(
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines.")] = 20,
    folder: FolderOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as they are.")] = False,
) -> None:
    """Show the last lines of the audit log."""
    from forebay.cli.records.audit import tail

    raise typer.Exit(tail(records_folder(folder), lines, as_json, settings.screen()))
