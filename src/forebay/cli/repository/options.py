"""The options of `forebay serve`. Those of a model repository have tritonserver's names and defaults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from forebay.cli.options import ENGINES_HELP, FROM_SOURCE, TASKS_HELP, Switch

_ONE: Final = "One model"
_WHAT: Final = "Model repository: what is served"
WHERE: Final = "Model repository: where"
HOW: Final = "Model repository: how"
TRACE: Final = "Model repository: logs and traces"


def in_panel(panel: str, *names: str, help: str, **more: Any) -> Any:
    """An option of that panel of `--help`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


Source = Annotated[
    str | None, typer.Argument(help="package:DIST[==VERSION]/PATH, a GGUF or ONNX file, or a model folder.")
]


@dataclass(frozen=True, slots=True)
class SingleModelOptions:
    """The options of `forebay serve MODEL_SOURCE` as given."""

    name: Annotated[str | None, in_panel(_ONE, help="Model name that clients use.", show_default=FROM_SOURCE)] = None
    task: Annotated[str | None, in_panel(_ONE, help=TASKS_HELP, show_default=FROM_SOURCE)] = None
    engine: Annotated[
        str | None,
        in_panel(_ONE, help=ENGINES_HELP, show_default=FROM_SOURCE),
    ] = None
    replicas: Annotated[int, in_panel(_ONE, help="Number of replicas.")] = 1
    port: Annotated[
        int | None, in_panel(_ONE, help="Gateway port; the admin API uses the next one.", show_default="8080")
    ] = None
    set_: Annotated[
        list[str] | None,
        in_panel(_ONE, "--set", metavar="PATH=VALUE", help="Set a value of the model (engine.threads=2) or cluster."),
    ] = None


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a model server as given, without those of gRPC; each field has the name of its option."""

    repository: Annotated[
        list[Path] | None,
        in_panel(
            _WHAT,
            "--repository",
            "--model-repository",
            "--model-store",
            help="Serve a Triton model repository, or a folder of model files; repeatable.",
            show_default=False,
        ),
    ] = None
    model_control_mode: Annotated[
        Literal["none", "poll", "explicit"],
        in_panel(
            _WHAT,
            help="none: load all models at startup; poll: also pick up changes; explicit: load only on request.",
        ),
    ] = "none"
    load_model: Annotated[
        list[str] | None,
        in_panel(
            _WHAT,
            metavar="MODEL",
            help="With explicit: load this model at startup; repeatable; * loads all.",
            show_default=False,
        ),
    ] = None
    repository_poll_secs: Annotated[
        int, in_panel(_WHAT, min=1, help="With poll: interval between scans of the repository, seconds.")
    ] = 15
    disable_auto_complete_config: Annotated[
        bool,
        in_panel(_WHAT, "--disable-auto-complete-config", help="Require a complete config.pbtxt for every model."),
    ] = False
    strict_model_config: Annotated[Switch, in_panel(_WHAT, help="true: same as --disable-auto-complete-config.")] = (
        "false"
    )
    model_config_name: Annotated[
        str, in_panel(_WHAT, help="Use a model's configs/NAME.pbtxt if it has one.", show_default=False)
    ] = ""
    backend_config: Annotated[
        list[str] | None,
        in_panel(
            _WHAT,
            metavar="[BACKEND,]NAME=VALUE",
            help="Only default-max-batch-size has an effect; without BACKEND, on models of all backends.",
            show_default=False,
        ),
    ] = None
    allow_pickle: Annotated[
        list[str] | None,
        in_panel(
            _WHAT,
            metavar="MODEL",
            help="Allow this model's files to be unpickled, which can run arbitrary code; repeatable.",
            show_default=False,
        ),
    ] = None
    allow_links_to: Annotated[
        list[Path] | None,
        in_panel(
            _WHAT,
            "--allow-links-to",
            metavar="DIR",
            help="Follow symbolic links from the repository to files below this folder; repeatable.",
            show_default=False,
        ),
    ] = None
    host: Annotated[
        str,
        in_panel(
            WHERE, help="Address to listen on; --http-address, --grpc-address and --metrics-address override it."
        ),
    ] = "127.0.0.1"
    http_port: Annotated[int, in_panel(WHERE, min=0, max=65535, help="HTTP port; 0 picks a free one.")] = 8000
    grpc_port: Annotated[int, in_panel(WHERE, min=0, max=65535, help="gRPC port; 0 picks a free one.")] = 8001
    metrics_port: Annotated[
        int,
        in_panel(WHERE, min=0, max=65535, help="Metrics port; metrics are also served at /metrics on the HTTP port."),
    ] = 8002
    allow_http: Annotated[Switch, in_panel(WHERE, help="Serve HTTP.")] = "true"
    allow_grpc: Annotated[Switch, in_panel(WHERE, help="Serve gRPC.")] = "true"
    allow_metrics: Annotated[Switch, in_panel(WHERE, help="Serve metrics on their own port.")] = "true"
    http_max_input_size: Annotated[int, in_panel(WHERE, min=1, help="Largest request body, bytes.")] = (
        64 * 1024 * 1024
    )
    http_max_json_output_size: Annotated[
        str,
        in_panel(
            WHERE,
            metavar="SIZE",
            help="Largest total size of tensors returned as JSON in one response; beyond it, 400.",
        ),
    ] = "64MiB"
    http_max_bodies_size: Annotated[
        str,
        in_panel(
            WHERE,
            metavar="SIZE",
            help="Total size of request bodies over 64 KiB being read at once, such as 2GiB; beyond it, 503.",
        ),
    ] = "2GiB"
    max_string_elements: Annotated[
        int, in_panel(WHERE, min=1, help="Most elements in one BYTES tensor, over HTTP or gRPC.")
    ] = 1_000_000
    http_header_forward_pattern: Annotated[
        str | None,
        in_panel(
            WHERE,
            metavar="REGEX",
            help="Forward request headers whose names match, in any case, as request parameters.",
            show_default=False,
        ),
    ] = None
    exit_on_error: Annotated[Switch, in_panel(HOW, help="true: exit if any model fails to load at startup.")] = "true"
    strict_readiness: Annotated[Switch, in_panel(HOW, help="true: report ready only while every model is ready.")] = (
        "true"
    )
    exit_timeout_secs: Annotated[
        int, in_panel(HOW, min=0, help="How long running requests may take to finish at shutdown, seconds.")
    ] = 30
    model_load_thread_count: Annotated[int, in_panel(HOW, min=1, help="Number of models that load in parallel.")] = 4
    memory_budget: Annotated[
        str | None,
        in_panel(
            HOW,
            metavar="SIZE",
            help="Memory for all loaded models, such as 8GiB; the least recently used are unloaded to stay within "
            "it.",
            show_default="none",
        ),
    ] = None
    hang_timeout_secs: Annotated[
        int, in_panel(HOW, min=1, help="A batch that takes longer fails and its process is replaced; seconds.")
    ] = 60
    process_memory_limit: Annotated[
        str | None,
        in_panel(
            HOW,
            metavar="SIZE",
            help="Replace a model process that grows beyond this, such as 4GiB.",
            show_default="none",
        ),
    ] = None
    pin: Annotated[
        list[str] | None,
        in_panel(
            HOW, metavar="MODEL", help="Never unload this model to free memory; repeatable.", show_default=False
        ),
    ] = None
    cache_config: Annotated[
        str | None,
        in_panel(HOW, metavar="local,size=SIZE", help="Enable a response cache of this size.", show_default="none"),
    ] = None
    rate_limit: Annotated[
        Literal["off", "execution_count"],
        in_panel(HOW, help="execution_count: instances wait for the resources they declare."),
    ] = "off"
    rate_limit_resource: Annotated[
        list[str] | None,
        in_panel(
            HOW,
            metavar="NAME:COUNT[:DEVICE]",
            help="Amount of a resource available to instances; repeatable.",
            show_default=False,
        ),
    ] = None
    host_policy: Annotated[
        list[str] | None,
        in_panel(
            HOW,
            metavar="NAME,KEY=VALUE",
            help="For the instances that name it: cpu-cores=0-3, numa-node=0, or gpus= with indices or UUIDs (MIG "
            "slices included), comma-separated; repeatable.",
            show_default=False,
        ),
    ] = None
    trace_config: Annotated[
        list[str] | None,
        in_panel(
            TRACE,
            metavar="NAME=VALUE",
            help="level=TIMESTAMPS, rate=N, count=N, triton,file=FILE, triton,log-frequency=N; repeatable.",
            show_default=False,
        ),
    ] = None
    metrics_config: Annotated[
        list[str] | None,
        in_panel(
            WHERE,
            metavar="NAME=VALUE",
            help="counter_latencies, summary_latencies or histogram_latencies, true or false; "
            "summary_quantiles=QUANTILE:ERROR,…; repeatable.",
            show_default=False,
        ),
    ] = None
