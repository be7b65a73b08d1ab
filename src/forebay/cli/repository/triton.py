"""tritonserver's options about logs, and those that differ here or have no effect, so that its command lines work."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

import typer

from forebay.cli.options import Switch
from forebay.cli.repository.options import HOW, TRACE, WHERE, in_panel
from forebay.cli.settings import WRONG_USAGE, UserError

_IDLE: Final = typer.Option(hidden=True)
"""Accepted without effect."""
Number = Annotated[int | None, _IDLE]
Text = Annotated[str | None, _IDLE]
Texts = Annotated[list[str] | None, _IDLE]
OnOff = Annotated[Switch | None, typer.Option(hidden=True)]
TraceValue = Annotated[str, typer.Option(hidden=True)]
"""Deprecated in Triton; the same as a value of --trace-config."""
Foreign = Annotated[Switch, typer.Option(hidden=True)]


def verbosity(word: str | int) -> int:
    """The level of `--log-verbose`: a number, true or false. Raises `ValueError`."""
    text = str(word).lower()
    if text not in ("true", "false") and not text.isdecimal():
        raise ValueError(f"{word!r} is not a level: 0, 1 and so on")
    return int(text == "true") if text.isalpha() else int(text)


@dataclass(frozen=True, slots=True)
class TritonOptions:
    """The options as given; each field has the name of its option. Those that default to None have no effect."""

    server_id: Annotated[str, in_panel(HOW, "--id", help="Server name in its metadata.")] = "forebay"
    http_address: Annotated[str, in_panel(WHERE, help="Address of the HTTP port.", show_default="--host")] = ""
    grpc_address: Annotated[str, in_panel(WHERE, help="Address of the gRPC port.", show_default="--host")] = ""
    metrics_address: Annotated[str, in_panel(WHERE, help="Address of the metrics port.", show_default="--host")] = ""
    response_cache_byte_size: Annotated[
        int, in_panel(HOW, min=0, help="Same as --cache-config local,size=BYTES.", show_default=False)
    ] = 0
    log_verbose: Annotated[
        int, in_panel(TRACE, parser=verbosity, metavar="LEVEL", help="1 or more: log every request.")
    ] = 0
    log_file: Annotated[str, in_panel(TRACE, help="Log file.", show_default="standard error")] = ""
    log_info: Annotated[Switch, in_panel(TRACE, help="Log informational messages.")] = "true"
    log_warning: Annotated[Switch, in_panel(TRACE, help="Log warnings.")] = "true"
    log_error: Annotated[Switch, in_panel(TRACE, help="Log errors.")] = "true"
    log_format: Annotated[
        Literal["default", "ISO8601"],
        in_panel(TRACE, help="Format that the logging API reports; log lines are JSON either way."),
    ] = "default"
    trace_file: Annotated[
        str, in_panel(TRACE, metavar="FILE", help="Same as --trace-config triton,file=FILE.", show_default=False)
    ] = ""
    trace_rate: TraceValue = ""
    trace_count: TraceValue = ""
    trace_log_frequency: TraceValue = ""
    trace_level: Texts = None
    allow_gpu_metrics: Annotated[Switch, in_panel(HOW, help="Export metrics of NVIDIA GPUs.")] = "true"
    metrics_interval_ms: Annotated[int, in_panel(HOW, min=100, help="Sampling interval of GPU metrics, ms.")] = 2000
    model_namespacing: Foreign = "false"
    allow_sagemaker: Foreign = "false"
    allow_vertex_ai: Foreign = "false"
    http_restricted_api: Annotated[list[str] | None, typer.Option(hidden=True)] = None
    grpc_restricted_protocol: Annotated[list[str] | None, typer.Option(hidden=True)] = None
    http_thread_count: Number = None
    grpc_infer_allocation_pool_size: Number = None
    buffer_manager_thread_count: Number = None
    pinned_memory_pool_byte_size: Number = None
    cuda_memory_pool_byte_size: Texts = None
    model_load_gpu_limit: Texts = None
    cache_directory: Text = None
    backend_directory: Text = None
    allow_cpu_metrics: OnOff = None
    reuse_http_port: OnOff = None
    reuse_grpc_port: OnOff = None
    enable_peer_access: OnOff = None
    min_supported_compute_capability: Text = None
    cuda_virtual_address_size: Texts = None
    model_load_retry_count: Number = None
    repoagent_directory: Text = None
    grpc_http2_max_pings_without_data: Number = None
    sagemaker_port: Number = None
    sagemaker_safe_port_range: Text = None
    sagemaker_thread_count: Number = None
    vertex_ai_port: Number = None
    vertex_ai_thread_count: Number = None
    vertex_ai_default_model: Text = None


BATCH_DEFAULT: Final = "default-max-batch-size"
"""The only setting of backends that has an effect."""
_REFUSED: Final = ("http_restricted_api", "grpc_restricted_protocol")
_USED: Final = (*_REFUSED, "trace_level")
"""Of the options that default to None."""


def idle_options(given: TritonOptions) -> Sequence[str]:
    """Options that were given but have no effect."""
    names = [each.name for each in fields(given) if each.default is None and each.name not in _USED]
    return [_option(name) for name in names if getattr(given, name) not in (None, [])]


def backend_settings(pairs: Sequence[str]) -> list[tuple[str, str, str]]:
    """Backend (empty: all), name and value of each --backend-config. Raises `UserError`."""
    found = []
    for pair in pairs:
        backend, comma, setting = pair.partition(",") if "," in pair else ("", "", pair)
        name, equals, value = setting.partition("=")
        if not name or not equals or (comma and not backend):
            expected = "expected BACKEND,NAME=VALUE, or NAME=VALUE for all backends"
            raise UserError(f"--backend-config: found {pair!r}; {expected}", WRONG_USAGE)
        found.append((backend, name, value))
    return found


def idle_settings(pairs: Sequence[str]) -> Sequence[str]:
    """Settings of backends that were given but have no effect. Raises `UserError`."""
    settings = zip(pairs, backend_settings(pairs), strict=True)
    return [f"--backend-config {pair}" for pair, (_, name, _) in settings if name != BATCH_DEFAULT]


def check(given: TritonOptions) -> None:
    """Reject options that must not be ignored silently. Raises `UserError`."""
    for name in _REFUSED:
        if getattr(given, name):
            raise UserError(
                f"{_option(name)}: restricting single APIs is not supported. Use a gateway with API keys "
                "(`forebay up`, `forebay keys`), or listen on --host 127.0.0.1 behind a proxy that restricts them; "
                "models are loaded and unloaded by request only with --model-control-mode explicit.",
                WRONG_USAGE,
            )
    if given.model_namespacing == "true":
        text = "--model-namespacing: models with the same name in two repositories are not supported. Rename one."
        raise UserError(text, WRONG_USAGE)

    for name in ("allow_sagemaker", "allow_vertex_ai"):
        if getattr(given, name) == "true":
            text = (
                f"{_option(name)}: its protocol is not supported. Use HTTP or gRPC, which have every function of it."
            )
            raise UserError(text, WRONG_USAGE)


def trace_pairs(given: TritonOptions) -> list[str]:
    """Triton's older trace options as values of --trace-config."""
    values = {
        "triton,file": given.trace_file,
        "rate": given.trace_rate,
        "count": given.trace_count,
        "triton,log-frequency": given.trace_log_frequency,
    }
    pairs = [f"{name}={value}" for name, value in values.items() if value]
    return [*pairs, *(f"level={level}" for level in given.trace_level or ())]


def log_changes(given: TritonOptions) -> dict[str, Any]:
    """The log settings, as the protocol would change them."""
    switches = {name: getattr(given, name) == "true" for name in ("log_info", "log_warning", "log_error")}
    return {**switches, "log_format": given.log_format}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
