"""The commands on rollouts, and `apply`; their implementation is imported when they run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.options import (
    AdminOptions,
    AdminUrlOption,
    JsonOption,
    ModelArgument,
    TokenOption,
    WatchOption,
    WhyOption,
    with_fields,
)

if TYPE_CHECKING:
    from forebay.cli.deploy.client import Admin

TargetArgument = Annotated[
    str, typer.Argument(metavar="MODEL|ID", help="A model with a rollout in progress, or the id of a rollout.")
]

rollout = typer.Typer(help="Inspect and control rollouts.", no_args_is_help=True)


@with_fields(api=AdminOptions)
def deploy(
    model: Annotated[str, typer.Argument(help="A model of the running cluster.")],
    *,
    revision: Annotated[
        str, typer.Option("--revision", "-r", help="Registered revision to roll out, by id or alias.")
    ],
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="KIND|FILE",
            help="canary, blue-green, shadow, ab, or a YAML plan file.",
            show_default="`rollout` of the model in the cluster file, else canary",
        ),
    ] = None,
    why: WhyOption = "",
    unchecked: Annotated[
        bool,
        typer.Option("--unchecked", help="Start even if current traffic is too low for the plan to reach a verdict."),
    ] = False,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait for the rollout to end; exit with 1 if the old revision still serves."),
    ] = False,
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Roll out a revision of a model without failing requests; a worse revision is rolled back automatically."""
    from forebay.cli.deploy import work

    chosen = work.plan_of(plan)
    body: dict[str, object] = {"revision": revision, "why": why, "unchecked": unchecked}
    if chosen is not None:
        body["plan"] = chosen
    raise typer.Exit(work.deploy(api.admin(), model, body, wait=wait, as_json=as_json))


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="Cluster file.")],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would change without changing it; models are still fetched and checked."
        ),
    ] = False,
    as_json: JsonOption = False,
    url: AdminUrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Apply a cluster file to the running cluster; applying it again changes nothing.

    The cluster does not keep the file: its next `forebay up`, or `forebay reload`, reads its own one again.
    """
    from forebay.cli.deploy import work
    from forebay.cli.deploy.client import Admin

    raise typer.Exit(work.apply(Admin(url, token_file, file), file, dry_run=dry_run, as_json=as_json))


@rollout.command()
@with_fields(api=AdminOptions)
def status(
    model: ModelArgument = None,
    *,
    watch: WatchOption = False,
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Show rollouts in progress, and the last one of each model."""
    from forebay.cli.deploy import work

    raise typer.Exit(work.status(api.admin(), model, watch=watch, as_json=as_json))


@rollout.command()
@with_fields(api=AdminOptions)
def pause(
    target: TargetArgument,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Hold a rollout at its current traffic share. A harmful revision is still rolled back."""
    _say("pause", target, why, as_json, api.admin())


@rollout.command()
@with_fields(api=AdminOptions)
def resume(
    target: TargetArgument,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Resume a paused rollout."""
    _say("resume", target, why, as_json, api.admin())


@rollout.command()
@with_fields(api=AdminOptions)
def promote(
    target: TargetArgument,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Advance to the next step without waiting for a verdict, as soon as replicas are ready."""
    _say("promote", target, why, as_json, api.admin())


@rollout.command()
@with_fields(api=AdminOptions)
def abort(
    target: TargetArgument,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Abort a rollout: all traffic returns to the old revision at once."""
    _say("abort", target, why, as_json, api.admin())


@rollout.command("history")
@with_fields(api=AdminOptions)
def past(
    model: ModelArgument = None,
    *,
    last: Annotated[int, typer.Option(min=1, max=1000, help="Number of most recent rollouts to show.")] = 20,
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Show finished rollouts and why they ended."""
    from forebay.cli.deploy import work

    raise typer.Exit(work.past(api.admin(), model, last, as_json))


def _say(command: str, target: str, why: str, as_json: bool, admin: "Admin") -> None:
    from forebay.cli.deploy import work

    raise typer.Exit(work.say(admin, target, command, why, as_json))
