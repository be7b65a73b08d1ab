"""The commands `forebay repository …`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import settings
from forebay.cli.settings import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from forebay.cli.repository.demos.writing import DemoModel

repository = typer.Typer(help="Model repositories.", no_args_is_help=True)


@repository.callback()
def options() -> None:
    """Model repositories."""


@repository.command()
def demo(
    folder: Annotated[Path | None, typer.Argument(help="Folder of the repository; created if missing.")] = None,
    names: Annotated[list[str] | None, typer.Argument(help="Models.", show_default="all that can run here")] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List the demo models and write nothing.")] = False,
) -> None:
    """Write demo models into a repository and fetch their weights."""
    from forebay.cli.repository.demos.table import DEMO
    from forebay.cli.repository.demos.writing import chosen

    console = settings.screen()
    if as_list or folder is None:
        show()
        return
    try:
        models = chosen(DEMO, names or [model.name for model in DEMO.values() if not model.missing])
    except KeyError as error:
        text = f"there is no demo model {error.args[0]!r}; there are: {', '.join(sorted(DEMO))}"
        raise UserError(text, WRONG_USAGE) from None
    for model in DEMO.values() if not names else ():
        if model not in models:
            console.print(f"skipped: {model.name}{_hint(model)}", style="yellow", markup=False)
    problems = [problem for model in models if (problem := _write(model, folder, console))]
    if len(problems) < len(models):
        console.print(f"Serve them: forebay serve --repository {folder}")
    if problems:
        raise UserError("\n".join(problems))


def _write(model: "DemoModel", folder: Path, console: "Console") -> str:
    """Write one model and print its path; returns the problem, or ""."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from forebay.cli.repository.demos.writing import write
    from forebay.registry.sources import SourceError

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(model.name, total=None)

        def report(stage: str, done: int, total: int | None) -> None:
            bars.update(bar, description=f"{model.name}: {stage}", completed=done, total=total)

        try:
            write(model, folder, settings.home(), report)
        except (SourceError, OSError) as error:
            return f"{model.name}: {error}"
        except ImportError as error:
            return f"{model.name}: making it needs a package that is not installed ({error}){_hint(model)}"
    console.print(f"{folder / model.name}")
    if model.missing:
        text = f"  {', '.join(model.missing)} not installed, but needed at run time{_hint(model)}"
        console.print(text, style="yellow", markup=False)
    return ""


def _hint(model: "DemoModel") -> str:
    return f"; pip install 'forebay[{model.extra}]'" if model.extra else ""


def show() -> None:
    """Print a table of the demo models, with the steps of each ensemble."""
    from rich.table import Table

    from forebay.cli.repository.demos.table import DEMO
    from forebay.cli.repository.demos.writing import chosen

    steps = {step for model in DEMO.values() for step in model.uses}
    table = Table("model", "task", "what it is", "needs", box=None, pad_edge=False)
    for model in DEMO.values():
        if model.name in steps:
            continue
        parts = chosen(DEMO, [model.name])
        missing = any(part.missing for part in parts)
        needs = "" if not model.extra else model.extra + (" (not installed)" if missing else "")
        table.add_row(model.name, model.task, model.about, needs)
        if model.uses:
            names = ", ".join(part.name for part in parts[1:])
            table.add_row("", "", f"its steps, which are models too: {names}", "", style="dim")
    settings.screen().print(table)
