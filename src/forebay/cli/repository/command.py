"""The command `forebay serve`: one model, or a whole model repository."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeGuard

import typer

from forebay.cli import settings
from forebay.cli.options import given_options, with_fields
from forebay.cli.repository.grpc import GrpcOptions
from forebay.cli.repository.options import ServerOptions, SingleModelOptions, Source
from forebay.cli.repository.triton import TritonOptions, check, idle_options, idle_settings, log_changes
from forebay.cli.settings import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from forebay.core.model import Task


@with_fields(model=SingleModelOptions, server=ServerOptions, grpc=GrpcOptions, triton=TritonOptions)
def serve(
    model_source: Source = None,
    *,
    model: SingleModelOptions,
    server: ServerOptions,
    grpc: GrpcOptions,
    triton: TritonOptions,
) -> None:
    """Serve one model, as in `forebay serve ./model.gguf`, or a model repository with `--repository DIR`."""
    if _is_one(model_source, server.repository):
        others = [name for group in (server, grpc, triton) for name in given_options(group)]
        if others:
            advice = "one model takes --port, and --set for all else, such as --set gateway.host=0.0.0.0."
            raise UserError(f"{', '.join(others)}: only with --repository; {advice}", WRONG_USAGE)
        _serve_one(model_source, model)
    if others := given_options(model):
        advice = "a repository takes --http-port, --grpc-port and others (`forebay serve --help`)."
        raise UserError(f"{', '.join(others)}: only with one model, not with --repository; {advice}", WRONG_USAGE)
    from forebay.cli.repository.plan import plan_of
    from forebay.cli.repository.run import run_server
    from forebay.modelserver.telemetry.logs import LogSettings

    check(triton)
    log = LogSettings(file=triton.log_file, verbose=triton.log_verbose)
    log.change(log_changes(triton))
    idle = [*idle_options(triton), *idle_settings(server.backend_config or ())]
    raise typer.Exit(run_server(plan_of(server, grpc, triton), log, settings.screen(), idle))


def _is_one(source: str | None, repository: list[Path] | None) -> TypeGuard[str]:
    if source is None and not repository:
        raise UserError("Nothing to serve: give MODEL_SOURCE (one model) or --repository DIR.", WRONG_USAGE)
    if source is not None and repository:
        raise UserError("Give either MODEL_SOURCE (one model) or --repository DIR, not both.", WRONG_USAGE)
    return source is not None


def _task(name: str | None) -> "Task | None":
    from forebay.core.model import Task

    if name is not None and name not in list(Task):
        raise UserError(f"--task: found {name!r}; allowed: {', '.join(Task)}", WRONG_USAGE)
    return Task(name) if name else None


def _serve_one(source: str, given: SingleModelOptions) -> NoReturn:
    from forebay.cli.serve import ModelOptions, cluster_of
    from forebay.cli.up import run_up

    model = ModelOptions(source, given.name, _task(given.task), given.engine, given.replicas, given.port)
    raise typer.Exit(run_up(cluster_of(model, given.set_ or [], os.environ), settings.home(), settings.screen()))
