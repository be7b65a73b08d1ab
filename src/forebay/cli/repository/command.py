"""The command `forebay serve`: one model, or a whole model repository."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeGuard

import typer

from forebay.cli import settings
from forebay.cli.repository import options as given
from forebay.cli.repository.fields import with_fields
from forebay.cli.repository.grpc import GrpcOptions
from forebay.cli.repository.triton import TritonOptions, check, idle_options, log_changes
from forebay.cli.settings import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from forebay.cli.repository import plan as planning
    from forebay.core.model import Task


@with_fields(grpc=GrpcOptions, triton=TritonOptions)
def serve(
    model_source: given.Source = None,
    *,
    name: given.Name = None,
    task: given.TaskName = None,
    engine: given.Engine = None,
    replicas: given.Replicas = 1,
    port: given.Port = None,
    set_: given.Set = None,
    repository: given.Repositories = None,
    model_control_mode: given.ControlMode = "none",
    load_model: given.Load = None,
    repository_poll_secs: given.PollSecs = 15,
    disable_auto_complete_config: given.NoAutoComplete = False,
    strict_model_config: given.StrictConfig = "false",
    model_config_name: given.ConfigName = "",
    backend_config: given.BackendConfig = None,
    allow_pickle: given.AllowPickle = None,
    allow_links_to: given.LinksTo = None,
    host: given.Host = "127.0.0.1",
    http_port: given.HttpPort = 8000,
    grpc_port: given.GrpcPort = 8001,
    metrics_port: given.MetricsPort = 8002,
    allow_http: given.AllowHttp = "true",
    allow_grpc: given.AllowGrpc = "true",
    allow_metrics: given.AllowMetrics = "true",
    http_max_input_size: given.InputMax = 64 * 1024 * 1024,
    http_max_json_output_size: given.JsonOutputMax = "64MiB",
    http_max_bodies_size: given.BodiesMax = "2GiB",
    max_string_elements: given.StringsMax = 1_000_000,
    http_header_forward_pattern: given.ForwardHeaders = None,
    exit_on_error: given.ExitOnError = "true",
    strict_readiness: given.StrictReadiness = "true",
    exit_timeout_secs: given.ExitTimeout = 30,
    model_load_thread_count: given.LoadThreads = 4,
    memory_budget: given.MemoryBudget = None,
    hang_timeout_secs: given.HangTimeout = 60,
    process_memory_limit: given.ProcessLimit = None,
    pin: given.Pin = None,
    cache_config: given.CacheConfig = None,
    rate_limit: given.Limit = "off",
    rate_limit_resource: given.Resources = None,
    host_policy: given.HostPolicies = None,
    trace_config: given.Trace = None,
    metrics_config: given.MetricsConfig = None,
    grpc: GrpcOptions,
    triton: TritonOptions,
) -> None:
    """Serve one model, as in `forebay serve ./model.gguf`, or a model repository with `--repository DIR`."""
    if _is_one(model_source, repository):
        _serve_one((model_source, name, _task(task), engine, replicas, port), set_ or [])
    from forebay.cli.repository.plan import ServerOptions

    _serve_all(ServerOptions(repository or [], model_control_mode, load_model, repository_poll_secs,
        disable_auto_complete_config, strict_model_config, model_config_name, backend_config, allow_pickle,
        allow_links_to, host, http_port, grpc_port, metrics_port, allow_http, allow_grpc, allow_metrics,
        http_max_input_size, http_max_json_output_size, http_max_bodies_size, max_string_elements,
        http_header_forward_pattern, exit_on_error, strict_readiness, exit_timeout_secs, model_load_thread_count,
        memory_budget, hang_timeout_secs, process_memory_limit, pin, cache_config, rate_limit, rate_limit_resource,
        host_policy, trace_config, metrics_config, grpc, triton))  # fmt: skip


def _serve_all(server: "planning.ServerOptions") -> NoReturn:
    from forebay.cli.repository.plan import plan_of
    from forebay.cli.repository.run import run_server
    from forebay.modelserver.telemetry.logs import LogSettings

    check(server.triton)
    log = LogSettings(file=server.triton.log_file, verbose=server.triton.log_verbose)
    log.change(log_changes(server.triton))
    raise typer.Exit(run_server(plan_of(server), log, settings.screen(), idle_options(server.triton)))


def _is_one(source: str | None, repository: list[Path] | None) -> TypeGuard[str]:
    if (source is None) == (not repository):
        raise UserError("Nothing to serve: give MODEL_SOURCE (one model) or --repository DIR, not both.", WRONG_USAGE)
    return source is not None


def _task(name: str | None) -> "Task | None":
    from forebay.core.model import Task

    if name is not None and name not in list(Task):
        raise UserError(f"--task: found {name!r}; allowed: {', '.join(Task)}", WRONG_USAGE)
    return Task(name) if name else None


def _serve_one(
    what: "tuple[str, str | None, Task | None, str | None, int, int | None]", assignments: list[str]
) -> NoReturn:
    from forebay.cli.serve import ModelOptions, cluster_of
    from forebay.cli.up import run_up

    raise typer.Exit(
        run_up(cluster_of(ModelOptions(*what), assignments, os.environ), settings.home(), settings.screen())
    )
