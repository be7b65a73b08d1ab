"""The command `forebay conformance`, and its output."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forebay.cli import settings
from forebay.cli.options import ApiKeyOption, CaOption, JsonOption
from forebay.cli.settings import NOT_REACHED, WRONG_USAGE, UserError

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from forebay.cli.conformance.check import Check, Result

RECORDED: Final = "recorded.json"
"""Triton's recorded responses to the suite's own checks; a file of this package."""
SERVER_OPTIONS: Final = (
    "--model-control-mode explicit --rate-limit execution_count --cache-config local,size=16777216"
)
"""What a server of the suite's models is started with, as the recorded one was."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What to check. `suite`: include the suite's own models, which the server must have."""

    url: str
    grpc: str | None
    metrics: str | None = None
    models: tuple[str, ...] = ()
    only: str = ""
    suite: bool = False
    api_key: str | None = None
    ca: Path | None = None


def conformance(
    url: Annotated[str | None, typer.Argument(help="Base URL of a server, such as http://127.0.0.1:8000.")] = None,
    *,
    grpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="gRPC address of the server, to check that too.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="URL", help="Metrics URL of the server, to check that too.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that may be run on zeros; repeatable.", show_default=False)
    ] = None,
    suite: Annotated[
        bool,
        typer.Option(
            "--suite",
            help="Also run the checks on the suite's own models, which the server must have and load on request.",
        ),
    ] = False,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only checks whose name contains this.")] = "",
    repository_out: Annotated[
        Path | None, typer.Option(help="Write the suite's models into a folder and check nothing.")
    ] = None,
    as_json: JsonOption = False,
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
) -> None:
    """Check how a server of the Open Inference Protocol v2 (Triton, KServe, Forebay, ...) behaves."""
    if repository_out is not None:
        _write(repository_out)
        return
    if url is None:
        raise UserError("No server given: forebay conformance URL.", WRONG_USAGE)
    from forebay.cli.server import base_url

    if grpc is not None and "://" in grpc:
        raise UserError(f"--grpc: found {grpc!r}; allowed: HOST:PORT", WRONG_USAGE)
    measured = base_url(metrics, "--metrics") if metrics is not None else None
    url = base_url(url, "URL").removesuffix("/v2")
    selection = Selection(url, grpc, measured, tuple(model or ()), only, suite, api_key, ca)
    raise typer.Exit(check(selection, settings.screen(), as_json))


def _write(folder: Path) -> None:
    from forebay.cli.conformance import repository

    try:
        repository.write(folder)
    except FileExistsError as error:
        raise UserError(f"{error.filename} already exists: name a new folder.") from None
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be written: {error.strerror}.") from None
    settings.screen().print(
        f"{folder} contains {len(repository.MODELS)} models. Start a server on it that loads models on request,\n"
        f"with response cache and rate limiter (Triton and Forebay):\n  {SERVER_OPTIONS}\n"
        "Its models of BF16 need PyTorch there (Forebay's extra `torch`). Then: forebay conformance URL --suite"
    )


def recorded() -> dict[str, Any]:
    """The recording: the server, and its observations by name of the check."""
    text = (resources.files("forebay.cli.conformance") / RECORDED).read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def chosen(selection: Selection) -> "list[Check]":
    """The selected checks."""
    from forebay.cli.conformance import anymodel, generic
    from forebay.cli.conformance.cases import all_checks

    checks = [*generic.checks(), *anymodel.checks(), *(all_checks() if selection.suite else ())]
    return [check for check in checks if selection.only in check.name]


def check(selection: Selection, console: "Console", as_json: bool) -> int:
    """Run the checks and print the results. Returns the exit code: 1 if a MUST does not hold."""
    import httpx

    from forebay.cli.conformance.check import Level, Verdict
    from forebay.cli.conformance.run import Absent, KeyRequired

    results: list[Result] = []
    checks = chosen(selection)
    if not checks:
        raise UserError(f"No check has '{selection.only}' in its name.", WRONG_USAGE)
    try:
        asyncio.run(_observe(selection, checks, results, console, as_json))
    except Absent as error:
        raise UserError(f"No such model at {selection.url}: {error}.", WRONG_USAGE) from None
    except KeyRequired as error:
        raise UserError(f"{selection.url}: {error}\nGive a valid key with --api-key or FOREBAY_API_KEY.") from None
    except httpx.TransportError as error:
        raise UserError(_unreached(selection.url, error), NOT_REACHED) from None
    if as_json:
        console.print_json(json.dumps([asdict(result) for result in results]))
    else:
        show(results, console)
    return int(any(each.verdict is Verdict.DEVIATES and each.level is Level.MUST for each in results))


def _unreached(url: str, error: "httpx.TransportError") -> str:
    import httpx

    if isinstance(error, httpx.ReadTimeout):
        return f"{url} has accepted the connection, and does not answer."
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"The certificate of {url} is not trusted ({str(error).partition('failed: ')[2]}). "
            "If it was issued by a private CA, name that with --ca or FOREBAY_CA."
        )
    return (
        f"Nothing answers at {url} ({str(error) or type(error).__name__}). Name the HTTP address of a server of the "
        "protocol; `forebay serve --repository DIR` is one."
    )


async def _observe(
    selection: Selection, checks: "Sequence[Check]", results: "list[Result]", console: "Console", quiet: bool
) -> None:
    """Run the checks, appending to `results`; at the end known deviations are marked."""
    from rich.progress import Progress

    from forebay.cli.conformance import known, repository
    from forebay.cli.conformance.generic import ANY
    from forebay.cli.conformance.run import discover, harmful_last, run, start_over
    from forebay.cli.conformance.server import Server, client
    from forebay.cli.server import bearer, trusted

    tls = trusted(selection.url, selection.ca)
    headers = bearer(selection.api_key, "--api-key or FOREBAY_API_KEY")
    async with client(selection.url, tls, headers) as http:
        server = Server(
            http,
            _rpc(selection.grpc, headers),
            selection.metrics,
            models=selection.models,
            may_infer=bool(selection.models),
        )
        try:
            await discover(server)
            with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
                bar = progress.add_task("checking", total=len(checks))

                def note(result: "Result") -> None:
                    results.append(result)
                    progress.update(bar, advance=1, description=result.name)

                own = [check for check in checks if not check.name.startswith(ANY)]
                await run(server, [check for check in checks if check not in own], {}, note)
                if own:
                    answers = recorded()["checks"]
                    await start_over(server, repository.MODELS)
                    await run(server, harmful_last(own, answers), answers, note)
            if server.name == known.NAME:
                results[:] = known.without_known(results)
        finally:
            if server.rpc is not None:
                await server.rpc.close()


def _rpc(address: str | None, headers: Mapping[str, str]) -> Any:
    if address is None:
        return None
    try:
        from forebay.cli.conformance.rpc import Rpc
    except ImportError as error:
        raise UserError(
            f"--grpc needs a package that is not installed ({error}): pip install 'forebay[triton]'"
        ) from None
    return Rpc(address, headers)


def show(results: "Sequence[Result]", console: "Console") -> None:
    """Print a table of deviations, why checks were skipped, and totals."""
    from rich.table import Table
    from rich.text import Text

    from forebay.cli.conformance.check import Level, Verdict

    table = Table("check", "level", "expected", "found", show_lines=True)
    for result in results:
        if result.verdict is Verdict.DEVIATES:
            colour = "red" if result.level is Level.MUST else "yellow"
            cells = (result.name, Text(result.level, colour), result.expected, result.found)
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
    if table.row_count:
        console.print(table)
    skipped: dict[str, int] = {}
    for result in results:
        if result.verdict is Verdict.SKIPPED:
            skipped[result.note] = skipped.get(result.note, 0) + 1
    for reason, count in skipped.items():
        console.print(Text(f"{count} skipped: {reason}", "dim"))
    counts = {level: 0 for level in Level}
    for result in results:
        counts[result.level] += result.verdict is Verdict.DEVIATES
    passed = sum(result.verdict is Verdict.PASSED for result in results)
    known = sum(result.verdict is Verdict.KNOWN for result in results)
    if known:
        console.print(Text(f"{known} known differences of Forebay, see docs/triton.md (--json says each)", "dim"))
    console.print(f"{passed} passed · {counts[Level.MUST]} MUST and {counts[Level.SHOULD]} SHOULD deviate")
