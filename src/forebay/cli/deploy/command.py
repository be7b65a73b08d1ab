"""The commands on rollouts, and `apply`; what they run is imported when they run."""

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
        "--file", "-f", help="File of the cluster that is meant.", show_default="./forebay.yaml, else what runs"
    ),
]
TokenOption = Annotated[
    Path | None,
    typer.Option(help="File with the key to send.", show_default="the key in FOREBAY_ADMIN_TOKEN, if any"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WhyOption = Annotated[str, typer.Option("--why", help="Why; it goes into the history.")]
TargetArgument = Annotated[
    str, typer.Argument(metavar="MODEL|ID", help="A model with a rollout under way, or the id of one.")
]
ModelArgument = Annotated[str | None, typer.Argument(help="Only this model.", show_default="all")]

rollout = typer.Typer(help="Rollouts: what is under way, and what people say to it.", no_args_is_help=True)


def deploy(
    model: Annotated[str, typer.Argument(help="A model of the running cluster.")],
    *,
    revision: Annotated[
        str, typer.Option("--revision", "-r", help="What it is to serve: a registered revision, by id or alias.")
    ],
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="KIND|FILE",
            help="canary, blue-green, shadow, ab, or a YAML file with a plan.",
            show_default="`rollout` of the model in the cluster file, else canary",
        ),
    ] = None,
    why: WhyOption = "",
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Also with a plan that can hardly decide at the traffic there is.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until it has ended; 1 if the old revision serves then.")
    ] = False,
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Roll out a revision of a model: no request fails, and what is worse goes back by itself."""
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
        bool, typer.Option("--dry-run", help="Only say what would change; models are fetched and checked.")
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Let the running cluster take a cluster file over; said twice, the second time changes nothing.

    The cluster does not keep the file: its next `forebay up`, or `forebay reload`, reads its own one again.
    """
    from forebay.cli.deploy import work
    from forebay.cli.deploy.client import Admin

    raise typer.Exit(work.apply(Admin(url, token_file, file), file, dry_run=dry_run, as_json=as_json))


@rollout.command()
def status(
    model: ModelArgument = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it up to date until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show the rollouts under way, and the last one of each model."""
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
    """Keep the share of a rollout as it is. What harms still ends it."""
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
    """Let a paused rollout go on."""
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
    """Take the next step without a verdict, as soon as there are replicas for it."""
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
    """End a rollout: the old revision serves everything at once."""
    _say("abort", target, why, as_json, (url, token_file, file))


@rollout.command("history")
def past(
    model: ModelArgument = None,
    *,
    last: Annotated[int, typer.Option(min=1, max=1000, help="So many, the newest.")] = 20,
    as_json: JsonOption = False,
    file: FileOption = None,
    url: UrlOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show the rollouts that have ended, and why."""
    from forebay.cli.deploy import work
    from forebay.cli.deploy.client import Admin

    raise typer.Exit(work.past(Admin(url, token_file, file), model, last, as_json))


def _say(
    command: str, target: str, why: str, as_json: bool, api: tuple[str | None, Path | None, Path | None]
) -> None:
    from forebay.cli.deploy import work
    from forebay.cli.deploy.client import Admin

    raise typer.Exit(work.say(Admin(*api), target, command, why, as_json))
