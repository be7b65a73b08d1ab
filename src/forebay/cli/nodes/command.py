"""The commands on nodes; their implementation is imported when they run."""

from typing import Annotated

import typer

from forebay.cli.options import AdminOptions, JsonOption, WhyOption, with_fields

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="A node of the running cluster.")]


@with_fields(api=AdminOptions)
def nodes(as_json: JsonOption = False, *, api: AdminOptions) -> None:
    """Show nodes and GPUs: their health, what runs on them, and why nothing may."""
    from forebay.cli.nodes import work

    raise typer.Exit(work.nodes(api.admin(), as_json=as_json))


@with_fields(api=AdminOptions)
def drain(
    node: NodeArgument,
    *,
    why: WhyOption = "",
    force: Annotated[
        bool, typer.Option("--force", help="Drain even if some replicas fit nowhere else; those stay until they do.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until nothing runs on the node any more.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0, help="With --wait: give up after this many seconds, with exit code 4.", show_default="for ever"
        ),
    ] = None,
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Take a node out of service: its replicas move, one per model at a time, without failing requests."""
    from forebay.cli.nodes import work

    body: dict[str, object] = {"why": why, "force": force}
    raise typer.Exit(work.drain(api.admin(), node, body, wait=wait, timeout_s=timeout, as_json=as_json))


@with_fields(api=AdminOptions)
def undrain(
    node: NodeArgument,
    *,
    device: Annotated[
        str | None,
        typer.Option(help="Only this GPU, after an error took it out of service.", show_default="the node"),
    ] = None,
    why: WhyOption = "",
    as_json: JsonOption = False,
    api: AdminOptions,
) -> None:
    """Put a node, or one of its GPUs, back into service."""
    from forebay.cli.nodes import work

    body = {"why": why} if device is None else {"why": why, "device": device}
    raise typer.Exit(work.undrain(api.admin(), node, body, as_json=as_json))
