"""The options of `forebay serve`. Those of a model repository have tritonserver's names and defaults."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

Switch = Literal["true", "false"]
_ONE: Final = "One model"
_WHAT: Final = "Model repository: what is served"
_WHERE: Final = "Model repository: where"
_HOW: Final = "Model repository: how"
_TRACE: Final = "Model repository: logs and traces"


def _of(panel: str, *names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


# --- one model

Source = Annotated[
    str | None, typer.Argument(help="package:DIST[==VERSION]/PATH, a GGUF or ONNX file, or a model folder.")
]
Name = Annotated[str | None, _of(_ONE, help="Model name that clients use.", show_default="from the source")]
TaskName = Annotated[str | None, _of(_ONE, help="chat, embed or tensor.", show_default="from the source")]
Engine = Annotated[
    str | None, _of(_ONE, help="openvino, llamacpp, onnx, modelserver or synthetic.", show_default="from the source")
]
Replicas = Annotated[int, _of(_ONE, help="Number of replicas.")]
Port = Annotated[int | None, _of(_ONE, help="Gateway port; the admin API uses the next one.", show_default="8080")]
Set = Annotated[
    list[str] | None,
    _of(_ONE, "--set", metavar="PATH=VALUE", help="Set a value of the model (engine.threads=2) or cluster."),
]

# --- what is served

Repositories = Annotated[
    list[Path] | None,
    _of(
        _WHAT,
        "--repository",
        "--model-repository",
        "--model-store",
        help="Serve a Triton model repository, or a folder of model files; repeatable.",
        show_default=False,
    ),
]
ControlMode = Annotated[
    Literal["none", "poll", "explicit"],
    _of(
        _WHAT,
        help="none: load all models at startup; poll: also pick up changes; explicit: load only on request.",
    ),
]
Load = Annotated[
    list[str] | None,
    _of(
        _WHAT,
        metavar="MODEL",
        help="With explicit: load this model at startup; repeatable; * loads all.",
        show_default=False,
    ),
]
PollSecs = Annotated[int, _of(_WHAT, min=1, help="With poll: interval between scans of the repository, seconds.")]
NoAutoComplete = Annotated[
    bool, _of(_WHAT, "--disable-auto-complete-config", help="Require a complete config.pbtxt for every model.")
]
StrictConfig = Annotated[Switch, _of(_WHAT, help="true: same as --disable-auto-complete-config.")]
ConfigName = Annotated[str, _of(_WHAT, help="Use a model's configs/NAME.pbtxt if it has one.", show_default=False)]
BackendConfig = Annotated[
    list[str] | None,
    _of(_WHAT, metavar="BACKEND,NAME=VALUE", help="Only default-max-batch-size has an effect.", show_default=False),
]
AllowPickle = Annotated[
    list[str] | None,
    _of(
        _WHAT,
        metavar="MODEL",
        help="Allow this model's files to be unpickled, which can run arbitrary code; repeatable.",
        show_default=False,
    ),
]

LinksTo = Annotated[
    list[Path] | None,
    _of(
        _WHAT,
        "--allow-links-to",
        metavar="DIR",
        help="Follow symbolic links from the repository to files below this folder; repeatable.",
        show_default=False,
    ),
]

# --- where

Host = Annotated[
    str, _of(_WHERE, "--host", "--http-address", "--grpc-address", "--metrics-address", help="Address to listen on.")
]
HttpPort = Annotated[int, _of(_WHERE, min=0, max=65535, help="HTTP port; 0 picks a free one.")]
GrpcPort = Annotated[int, _of(_WHERE, min=0, max=65535, help="gRPC port; 0 picks a free one.")]
MetricsPort = Annotated[
    int, _of(_WHERE, min=0, max=65535, help="Metrics port; metrics are also served at /metrics on the HTTP port.")
]
AllowHttp = Annotated[Switch, _of(_WHERE, help="Serve HTTP.")]
AllowGrpc = Annotated[Switch, _of(_WHERE, help="Serve gRPC.")]
AllowMetrics = Annotated[Switch, _of(_WHERE, help="Serve metrics on their own port.")]
InputMax = Annotated[int, _of(_WHERE, "--http-max-input-size", min=1, help="Largest request body, bytes.")]
JsonOutputMax = Annotated[
    str,
    _of(
        _WHERE, metavar="SIZE", help="Largest total size of tensors returned as JSON in one response; beyond it, 400."
    ),
]
BodiesMax = Annotated[
    str,
    _of(
        _WHERE,
        metavar="SIZE",
        help="Total size of request bodies over 64 KiB being read at once, such as 2GiB; beyond it, 503.",
    ),
]
StringsMax = Annotated[
    int, _of(_WHERE, "--max-string-elements", min=1, help="Most elements in one BYTES tensor, over HTTP or gRPC.")
]
ForwardHeaders = Annotated[
    str | None,
    _of(
        _WHERE,
        "--http-header-forward-pattern",
        metavar="REGEX",
        help="Forward request headers whose names match as request parameters.",
        show_default=False,
    ),
]

# --- how

ExitOnError = Annotated[Switch, _of(_HOW, help="true: exit if any model fails to load at startup.")]
StrictReadiness = Annotated[Switch, _of(_HOW, help="true: report ready only while every model is ready.")]
ExitTimeout = Annotated[
    int, _of(_HOW, min=0, help="How long running requests may take to finish at shutdown, seconds.")
]
LoadThreads = Annotated[
    int, _of(_HOW, "--model-load-thread-count", min=1, help="Number of models that load in parallel.")
]
MemoryBudget = Annotated[
    str | None,
    _of(
        _HOW,
        metavar="SIZE",
        help="Memory for all loaded models, such as 8GiB; the least recently used are unloaded to stay within it.",
        show_default="none",
    ),
]
HangTimeout = Annotated[
    int, _of(_HOW, min=1, help="A batch that takes longer fails and its process is replaced; seconds.")
]
ProcessLimit = Annotated[
    str | None,
    _of(
        _HOW,
        metavar="SIZE",
        help="Replace a model process that grows beyond this, such as 4GiB.",
        show_default="none",
    ),
]
Pin = Annotated[
    list[str] | None,
    _of(_HOW, metavar="MODEL", help="Never unload this model to free memory; repeatable.", show_default=False),
]
CacheConfig = Annotated[
    str | None,
    _of(_HOW, metavar="local,size=SIZE", help="Enable a response cache of this size.", show_default="none"),
]
Limit = Annotated[
    Literal["off", "execution_count"],
    _of(_HOW, help="execution_count: instances wait for the resources they declare."),
]
Resources = Annotated[
    list[str] | None,
    _of(
        _HOW,
        "--rate-limit-resource",
        metavar="NAME:COUNT[:DEVICE]",
        help="Amount of a resource available to instances; repeatable.",
        show_default=False,
    ),
]
HostPolicies = Annotated[
    list[str] | None,
    _of(
        _HOW,
        "--host-policy",
        metavar="NAME,KEY=VALUE",
        help="For the instances that name it: cpu-cores=0-3, numa-node=0, or gpus= with indices or UUIDs (MIG "
        "slices included), comma-separated; repeatable.",
        show_default=False,
    ),
]

MetricsConfig = Annotated[
    list[str] | None,
    _of(
        _WHERE,
        "--metrics-config",
        metavar="NAME=VALUE",
        help="counter_latencies, summary_latencies or histogram_latencies, true or false; "
        "summary_quantiles=QUANTILE:ERROR,…; repeatable.",
        show_default=False,
    ),
]

# --- logs and traces

Trace = Annotated[
    list[str] | None,
    _of(
        _TRACE,
        "--trace-config",
        metavar="NAME=VALUE",
        help="level=TIMESTAMPS, rate=N, count=N, triton,file=FILE, triton,log-frequency=N; repeatable.",
        show_default=False,
    ),
]
