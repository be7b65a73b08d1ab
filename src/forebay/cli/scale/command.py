"""The commands on scaling; what they run is imported when they run."""

from typing import Annotated

import typer

from forebay.cli.deploy.command import FileOption, JsonOption, ModelArgument, TokenOption, UrlOption, WhyOption

scale = typer.Typer(help="How many replicas models have, and why.", no_args_is_help=True)
OneModel = Annotated[str, typer.Argument(metavar="MODEL", help="A model of the running cluster.")]


@scale.command()
def status(
    model: ModelArgument = None,
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show how many replicas every model has, and the last decision about it."""
    from forebay.cli.deploy.client import Admin
    from forebay.cli.scale import work

    raise typer.Exit(work.status(Admin(url, token_file, file), model, as_json=as_json))


@scale.command()
def explain(
    model: OneModel,
    *,
    last: Annotated[int, typer.Option(min=1, max=200, help="So many changes, the newest.")] = 10,
    everything: Annotated[bool, typer.Option("--all", help="Also decisions that changed nothing.")] = False,
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show why a model has as many replicas as it has: the figures, the bounds, the last changes."""
    from forebay.cli.deploy.client import Admin
    from forebay.cli.scale import work

    raise typer.Exit(work.explain(Admin(url, token_file, file), model, last, everything=everything, as_json=as_json))


@scale.command("set")
def fix(
    model: OneModel,
    replicas: Annotated[
        int | None, typer.Argument(min=0, help="So many, whatever the load.", show_default=False)
    ] = None,
    *,
    least: Annotated[
        int | None,
        typer.Option("--min", min=0, help="Fewest, in the place of the cluster file's."),
    ] = None,
    most: Annotated[
        int | None, typer.Option("--max", min=1, help="Most, in the place of the cluster file's.")
    ] = None,
    why: WhyOption = "",
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Say how many replicas a model has, or within which bounds; it holds until `forebay scale auto`."""
    from forebay.cli.deploy.client import Admin
    from forebay.cli.scale import work

    wish = {"replicas": replicas, "min": least, "max": most}
    raise typer.Exit(work.change(Admin(url, token_file, file), model, wish, why, as_json=as_json))


@scale.command()
def auto(
    model: OneModel,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Forget what people have set: the cluster file counts, and the load."""
    from forebay.cli.deploy.client import Admin
    from forebay.cli.scale import work

    raise typer.Exit(work.change(Admin(url, token_file, file), model, None, why, as_json=as_json))
