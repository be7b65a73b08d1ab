"""The commands that read records; their implementation is imported when they run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import settings
from forebay.cli.options import JsonOption, StoreOptions, with_fields
from forebay.cli.settings import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from forebay.cli.records.reading import RecordFiles
    from forebay.cli.records.remote import RemoteRecords

audit = typer.Typer(help="The audit log.", no_args_is_help=True)

FolderOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of records.",
        show_default="of the cluster file's cluster, else of the only one, or the one that runs",
    ),
]


@with_fields(api=StoreOptions)
def explain(
    request_id: Annotated[str, typer.Argument(help="`x-request-id` of the response.")],
    *,
    folder: FolderOption = None,
    as_json: JsonOption = False,
    api: StoreOptions,
) -> None:
    """Show how a request was routed: every candidate with its score, the attempts, the outcome."""
    from forebay.cli.records.explain import explain

    with _opened(folder, api) as records:
        raise typer.Exit(explain(records, request_id, as_json, settings.screen()))


@with_fields(api=StoreOptions)
def usage(
    *,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="A date, or a number of days such as 7d: the last 7, including today (UTC).", show_default="all"
        ),
    ] = None,
    folder: FolderOption = None,
    as_json: JsonOption = False,
    api: StoreOptions,
) -> None:
    """Show requests and tokens by tenant and model."""
    from forebay.cli.records.usage import first_day, usage
    from forebay.wire.admin_request import UsageRequest

    wanted = UsageRequest(tenant, model, first_day(since))
    with _opened(folder, api) as records:
        raise typer.Exit(usage(records, wanted, as_json, settings.screen()))


@audit.command()
@with_fields(api=StoreOptions)
def verify(
    *,
    folder: FolderOption = None,
    archived: Annotated[
        bool,
        typer.Option(
            "--archived", help="Accept that the oldest files, or whole folders, were deliberately moved elsewhere."
        ),
    ] = False,
    as_json: JsonOption = False,
    api: StoreOptions,
) -> None:
    """Verify the audit log: finds changed and removed lines, files and logs, and exits with 1 if there are any.

    Gateways record the heads of each other's logs every hour. Someone who rewrites what was logged since then, or
    all logs together, leaves no trace: store the printed heads elsewhere from time to time.
    """
    from forebay.cli.records.audit import verify

    with _opened(folder, api) as records:
        raise typer.Exit(verify(records, archived, as_json, settings.screen()))


@audit.command()
@with_fields(api=StoreOptions)
def tail(
    *,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Number of lines.")] = 20,
    folder: FolderOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the raw lines.")] = False,
    api: StoreOptions,
) -> None:
    """Show the last lines of the audit log."""
    from forebay.cli.records.audit import tail

    with _opened(folder, api) as records:
        raise typer.Exit(tail(records, lines, as_json, settings.screen()))


@contextmanager
def _opened(folder: Path | None, api: StoreOptions) -> "Iterator[RecordFiles | RemoteRecords]":
    """The records of a folder, behind an admin API, or of the cluster file. Raises `UserError`."""
    from forebay.cli.records.reading import RecordFiles, records_folder

    if folder is not None and (api.file or api.url or api.token_file):
        raise UserError(
            "--folder names files of this machine: it cannot be combined with -f, --url or --token-file.", WRONG_USAGE
        )
    if folder is not None and not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    if folder is None and api.through_api:
        from forebay.cli.records.remote import RemoteRecords

        yield RemoteRecords(api.admin())
        return
    try:
        yield RecordFiles(folder or records_folder(api.file))
    except BrokenPipeError:  # whoever reads the output has closed it: that ends a command quietly
        raise
    except OSError as error:
        if error.filename is None:  # it is the output that cannot be written
            raise
        raise UserError(
            f"{error.filename}: {error.strerror}. Files come and go while gateways run: try again."
        ) from error
