"""The options of `forebay serve`. Those of a model repository have the names and defaults that tritonserver has."""

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
    str | None, typer.Argument(help="package:DIST[==VERSION]/PATH, or a GGUF or ONNX file, or a model folder.")
]
Name = Annotated[str | None, _of(_ONE, help="Name for clients.", show_default="from the source")]
TaskName = Annotated[str | None, _of(_ONE, help="chat, embed or tensor.", show_default="from the source")]
Engine = Annotated[
    str | None, _of(_ONE, help="openvino, llamacpp, onnx, modelserver or synthetic.", show_default="from the source")
]
Replicas = Annotated[int, _of(_ONE, help="How many replicas to run.")]
Port = Annotated[
    int | None, _of(_ONE, help="Port of the gateway; the admin API takes the next one.", show_default="8080")
]
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
        help="none: all models that are there; poll: and what changes later; explicit: what is asked for.",
    ),
]
Load = Annotated[
    list[str] | None,
    _of(
        _WHAT,
        metavar="MODEL",
        help="With explicit: load this at the start; repeatable; * is all.",
        show_default=False,
    ),
]
PollSecs = Annotated[int, _of(_WHAT, min=1, help="With poll: how often the repository is looked at, seconds.")]
NoAutoComplete = Annotated[
    bool, _of(_WHAT, "--disable-auto-complete-config", help="A model must have a whole configuration.")
]
StrictConfig = Annotated[Switch, _of(_WHAT, help="true: the same as --disable-auto-complete-config.")]
ConfigName = Annotated[
    str, _of(_WHAT, help="Take configs/NAME.pbtxt of a model where it is there.", show_default=False)
]
BackendConfig = Annotated[
    list[str] | None,
    _of(_WHAT, metavar="BACKEND,NAME=VALUE", help="Only default-max-batch-size has effect.", show_default=False),
]
AllowPickle = Annotated[
    list[str] | None,
    _of(
        _WHAT,
        metavar="MODEL",
        help="Let this model's files be unpickled, which runs any code in them; repeatable.",
        show_default=False,
    ),
]

# --- where

Host = Annotated[
    str, _of(_WHERE, "--host", "--http-address", "--grpc-address", "--metrics-address", help="Address to listen on.")
]
HttpPort = Annotated[int, _of(_WHERE, min=0, max=65535, help="Port of HTTP; 0: any that is free.")]
GrpcPort = Annotated[int, _of(_WHERE, min=0, max=65535, help="Port of gRPC.")]
MetricsPort = Annotated[int, _of(_WHERE, min=0, max=65535, help="Port of metrics; they are at HTTP's /metrics too.")]
AllowHttp = Annotated[Switch, _of(_WHERE, help="Whether there is HTTP.")]
AllowGrpc = Annotated[Switch, _of(_WHERE, help="Whether there is gRPC.")]
AllowMetrics = Annotated[Switch, _of(_WHERE, help="Whether metrics have a port of their own.")]
InputMax = Annotated[int, _of(_WHERE, "--http-max-input-size", min=1, help="Largest body of a request, bytes.")]
JsonOutputMax = Annotated[
    str, _of(_WHERE, metavar="SIZE", help="Of an answer's tensors that are written as JSON; more get 400.")
]
BodiesMax = Annotated[
    str,
    _of(
        _WHERE,
        metavar="SIZE",
        help="Of all bodies over 64 KiB that are being read at the same time, such as 2GiB; more get 503.",
    ),
]
StringsMax = Annotated[
    int, _of(_WHERE, "--max-string-elements", min=1, help="Most elements of one BYTES tensor, over HTTP or gRPC.")
]
ForwardHeaders = Annotated[
    str | None,
    _of(
        _WHERE,
        "--http-header-forward-pattern",
        metavar="REGEX",
        help="Request headers with such a name become parameters.",
        show_default=False,
    ),
]

# --- how

ExitOnError = Annotated[Switch, _of(_HOW, help="true: do not run unless every model can be loaded.")]
StrictReadiness = Annotated[Switch, _of(_HOW, help="true: ready only while every model is.")]
ExitTimeout = Annotated[int, _of(_HOW, min=0, help="How long what runs may take at the end, seconds.")]
LoadThreads = Annotated[int, _of(_HOW, "--model-load-thread-count", min=1, help="Models that load at the same time.")]
MemoryBudget = Annotated[
    str | None,
    _of(
        _HOW,
        metavar="SIZE",
        help="Of all loaded models, such as 8GiB: the least recently used give way.",
        show_default="none",
    ),
]
HangTimeout = Annotated[
    int, _of(_HOW, min=1, help="A batch that takes longer is given up, and its process replaced; seconds.")
]
ProcessLimit = Annotated[
    str | None,
    _of(
        _HOW,
        metavar="SIZE",
        help="A model process that grows beyond this, such as 4GiB, is replaced.",
        show_default="none",
    ),
]
Pin = Annotated[
    list[str] | None, _of(_HOW, metavar="MODEL", help="This model never gives way; repeatable.", show_default=False)
]
CacheConfig = Annotated[
    str | None, _of(_HOW, metavar="local,size=SIZE", help="Response cache of this size.", show_default="none")
]
Limit = Annotated[
    Literal["off", "execution_count"], _of(_HOW, help="execution_count: instances wait for the resources they name.")
]
Resources = Annotated[
    list[str] | None,
    _of(
        _HOW,
        "--rate-limit-resource",
        metavar="NAME:COUNT[:DEVICE]",
        help="How much there is; repeatable.",
        show_default=False,
    ),
]
HostPolicies = Annotated[
    list[str] | None,
    _of(
        _HOW,
        "--host-policy",
        metavar="NAME,KEY=VALUE",
        help="For the instances that name it: cpu-cores=0-3, numa-node=0, or gpus= with numbers or UUIDs (of MIG "
        "slices too) between commas; repeatable.",
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
