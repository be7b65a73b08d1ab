"""The commands on scaling; their implementation is imported when they run."""

from typing import Annotated

import typer

from forebay.cli.options import AdminOptions, JsonOption, ModelArgument, WhyOption, with_fields

scale = typer.Typer(help="Inspect and control the number of replicas.", no_args_is_help=True)
OneModel = Annotated[str, typer.Argument(metavar="MODEL", help="A model of the running cluster.")]


@scale.command()
@with_fields(api=AdminOptions)
def status(
    model: ModelArgument = None,
    as_json: JsonOption = False,
    *,
    api: AdminOptions,
) -> None:
    """Show the number of replicas of every model, and the last scaling decision."""
    from forebay.cli.scale import work

    raise typer.Exit(work.status(api.admin(), model, as_json=as_json))


@scale.command()
@with_fields(api=AdminOptions)
def explain(
    model: OneModel,
    *,
    last: Annotated[int, typer.Option(min=1, max=200, help="Number of most recent changes to show.")] = 10,
    everything: Annotated[bool, typer.Option("--all", help="Include decisions that changed nothing.")] = False,
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Explain a model's number of replicas: the figures, the bounds, the latest changes."""
    from forebay.cli.scale import work

    raise typer.Exit(work.explain(api.admin(), model, last, everything=everything, as_json=as_json))


@scale.command("set")
@with_fields(api=AdminOptions)
def fix(
    model: OneModel,
    replicas: Annotated[
        int | None, typer.Argument(min=0, help="Fixed number of replicas, whatever the load.", show_default=False)
    ] = None,
    *,
    least: Annotated[
        int | None,
        typer.Option("--min", min=0, help="Minimum, overriding the cluster file."),
    ] = None,
    most: Annotated[int | None, typer.Option("--max", min=1, help="Maximum, overriding the cluster file.")] = None,
    why: WhyOption = "",
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Fix a model's number of replicas, or override its bounds, until `forebay scale auto`."""
    from forebay.cli.scale import work

    override = {"replicas": replicas, "min": least, "max": most}
    raise typer.Exit(work.change(api.admin(), model, override, why, as_json=as_json))


@scale.command()
@with_fields(api=AdminOptions)
def auto(
    model: OneModel,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Remove manual overrides: the cluster file and the load decide again."""
    from forebay.cli.scale import work

    raise typer.Exit(work.change(api.admin(), model, None, why, as_json=as_json))
