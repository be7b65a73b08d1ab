"""The commands on rollouts, and `apply`; their implementation is imported when they run."""

from pathlib import Path
from typing import Annotated

import typer

UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="Admin API.", show_default="FOREBAY_ADMIN_URL, else that of the cluster file"),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file", "-f", help="Cluster file of the cluster to talk to.", show_default="./forebay.yaml, else what runs"
    ),
]
TokenOption = Annotated[
    Path | None,
    typer.Option(help="File that holds the API key to send.", show_default="the key in FOREBAY_ADMIN_TOKEN, if any"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WhyOption = Annotated[str, typer.Option("--why", help="Reason, recorded in the history.")]
TargetArgument = Annotated[
    str, typer.Argument(metavar="MODEL|ID", help="A model with a rollout in progress, or the id of a rollout.")
]
ModelArgument = Annotated[str | None, typer.Argument(help="Only this model.", show_default="all")]

rollout = typer.Typer(help="Inspect and control rollouts.", no_args_is_help=True)


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
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Roll out a revision of a model without failing requests; a worse revision is rolled back automatically."""
    from forebay.cli.deploy import work
    from forebay.cli.deploy.client import Admin

    chosen = work.plan_of(plan)
    body: dict[str, object] = {"revision": revision, "why": why, "unchecked": unchecked}
    if chosen is not None:
        body["plan"] = chosen
    raise typer.Exit(work.deploy(Admin(url, token_file, file), model, body, wait=wait, as_json=as_json))


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="Cluster file.")],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would change without changing it; models are still fetched and checked."
        ),
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Apply a cluster file to the running cluster; applying it again changes nothing.

    The cluster does not keep the file: its next `forebay up`, or `forebay reload`, reads its own one again.
    """
    from forebay.cli.deploy import work
    from forebay.cli.deploy.client import Admin

    raise typer.Exit(work.apply(Admin(url, token_file, file), file, dry_run=dry_run, as_json=as_json))


@rollout.command()
def status(
    model: ModelArgument = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the view up to date until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show rollouts in progress, and the last one of each model."""
    from forebay.cli.deploy import work
    from forebay.cli.deploy.client import Admin

    raise typer.Exit(work.status(Admin(url, token_file, file), model, watch=watch, as_json=as_json))


@rollout.command()
def pause(
    target: TargetArgument,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Hold a rollout at its current traffic share. A harmful revision is still rolled back."""
    _say("pause", target, why, as_json, (url, token_file, file))


@rollout.command()
def resume(
    target: TargetArgument,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Resume a paused rollout."""
    _say("resume", target, why, as_json, (url, token_file, file))


@rollout.command()
def promote(
    target: TargetArgument,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Advance to the next step without waiting for a verdict, as soon as replicas are ready."""
    _say("promote", target, why, as_json, (url, token_file, file))


@rollout.command()
def abort(
    target: TargetArgument,
    *,
    why: WhyOption = "",
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Abort a rollout: all traffic returns to the old revision at once."""
    _say("abort", target, why, as_json, (url, token_file, file))


@rollout.command("history")
def past(
    model: ModelArgument = None,
    *,
    last: Annotated[int, typer.Option(min=1, max=1000, help="Number of most recent rollouts to show.")] = 20,
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show finished rollouts and why they ended."""
    from forebay.cli.deploy import work
    from forebay.cli.deploy.client import Admin

    raise typer.Exit(work.past(Admin(url, token_file, file), model, last, as_json))


def _say(
    command: str, target: str, why: str, as_json: bool, api: tuple[str | None, Path | None, Path | None]
) -> None:
    from forebay.cli.deploy import work
    from forebay.cli.deploy.client import Admin

    raise typer.Exit(work.say(Admin(*api), target, command, why, as_json))
