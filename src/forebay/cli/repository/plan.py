"""Turns the options of a model server into its plan."""

import math
import os
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from forebay import __version__
from forebay.cli.repository.grpc import GrpcOptions
from forebay.cli.repository.options import ServerOptions
from forebay.cli.repository.triton import BATCH_DEFAULT, TritonOptions, backend_settings, trace_pairs
from forebay.cli.settings import WRONG_USAGE, UserError
from forebay.core.model import TlsSpec
from forebay.core.serving.limiter import Amount
from forebay.engines.tensor.gpus import computing, visible
from forebay.modelserver.http.options import FrontOptions
from forebay.modelserver.models.life.machine import has_node
from forebay.modelserver.models.options import Control, Options
from forebay.modelserver.process.placement import Placement
from forebay.modelserver.repository import Rules
from forebay.modelserver.repository.values import CONFIG_FILE
from forebay.modelserver.rpc.front import RpcOptions, RpcTls
from forebay.modelserver.serve import LatencyMetrics, ListenAddresses, Plan
from forebay.modelserver.telemetry.latencies import QUANTILES
from forebay.modelserver.telemetry.tracing import OFF, TENSORS, TIMESTAMPS, Tracing
from forebay.net.http2 import HTTP_2, Keepalive
from forebay.net.tls import BadPair, load

T = TypeVar("T")
UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_COMPRESSIONS: Final = {"none": "none", "low": "deflate", "medium": "gzip", "high": "gzip"}
CPUS_MAX: Final = 4096
LIMITED: Final = "execution_count"


def plan_of(given: ServerOptions, grpc: GrpcOptions, triton: TritonOptions) -> Plan:
    """The plan. Raises `UserError` for invalid options."""
    for folder in given.repository or ():
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder. A repository is a folder with one folder for each model.")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise UserError(f"{folder}: the current user cannot read this folder.")
        if (folder / CONFIG_FILE).exists():
            above, alone = shlex.quote(str(folder.absolute().parent)), shlex.quote(str(folder))
            raise UserError(
                f"{folder} is the folder of a model; a repository is its parent folder. Serve that, or this model:\n"
                f"  forebay serve --repository {above}\n"
                f"  forebay serve {alone}"
            )
    if not (_on(given.allow_http) or _on(given.allow_grpc)):
        raise UserError(
            "--allow-http and --allow-grpc are both false: the server would accept no requests.", WRONG_USAGE
        )
    forwarded = None
    if given.http_header_forward_pattern is not None:
        forwarded = _read("--http-header-forward-pattern", _name_pattern, given.http_header_forward_pattern)
    listen = ListenAddresses(
        triton.http_address or given.host,
        given.http_port if _on(given.allow_http) else None,
        given.grpc_port if _on(given.allow_grpc) else None,
        given.metrics_port if _on(given.allow_metrics) else None,
        grpc_host=triton.grpc_address or given.host,
        metrics_host=triton.metrics_address or given.host,
    )
    size_max = given.http_max_input_size
    return Plan(
        _options(given, triton),
        listen,
        body_bytes_max=size_max,
        bodies_bytes_max=_read("--http-max-bodies-size", size, given.http_max_bodies_size),
        front=FrontOptions(
            name=triton.server_id,
            version=__version__,
            json_bytes_max=size_max,
            json_output_bytes_max=_read("--http-max-json-output-size", size, given.http_max_json_output_size),
            strings_max=given.max_string_elements,
            forwarded_headers=forwarded,
        ),
        rpc=rpc_options(grpc, triton.server_id),
        exit_on_error=_on(given.exit_on_error),
        drain_s=float(given.exit_timeout_secs),
        tracing=tracing([*trace_pairs(triton), *(given.trace_config or ())]),
        latencies=_shown(given.metrics_config or ()),
        gpus_every_s=triton.metrics_interval_ms / 1000 if _on(triton.allow_gpu_metrics) else 0.0,
    )


def rpc_options(given: GrpcOptions, name: str = "forebay") -> RpcOptions:
    """The settings of the gRPC server. Raises `UserError`."""
    forwarded = None
    if given.grpc_header_forward_pattern is not None:
        forwarded = _read("--grpc-header-forward-pattern", _name_pattern, given.grpc_header_forward_pattern)
    return RpcOptions(
        name=name,
        version=__version__,
        message_bytes_max=given.grpc_max_message_size,
        messages_bytes_max=_read("--grpc-max-messages-size", size, given.grpc_max_messages_size),
        compression=_COMPRESSIONS[given.grpc_infer_response_compression_level],
        forwarded_headers=forwarded,
        keepalive=Keepalive(
            ping_s=given.grpc_keepalive_time / 1000,
            ping_timeout_s=given.grpc_keepalive_timeout / 1000,
            ping_without_calls=_on(given.grpc_keepalive_permit_without_calls),
            ping_least_s=given.grpc_http2_min_recv_ping_interval_without_data / 1000,
            strikes_max=given.grpc_http2_max_ping_strikes,
            age_s=given.grpc_max_connection_age / 1000 or math.inf,
            age_grace_s=given.grpc_max_connection_age_grace / 1000 or math.inf,
        ),
        tls=_tls(given) if _on(given.grpc_use_ssl) or _on(given.grpc_use_ssl_mutual) else None,
    )


def _tls(given: GrpcOptions) -> RpcTls:
    """The TLS settings. Raises `UserError`."""
    server = TlsSpec(given.grpc_server_cert, given.grpc_server_key)
    clients = given.grpc_root_cert if _on(given.grpc_use_ssl_mutual) else None
    try:
        load(server, clients, HTTP_2)
    except BadPair as error:
        options = {"certificate": "--grpc-server-cert", "key": "--grpc-server-key", "clients": "--grpc-root-cert"}
        raise UserError(
            "\n".join(f"{options[p.path]}: found {p.found}; expected {p.allowed}" for p in error.problems),
            WRONG_USAGE,
        ) from None
    return RpcTls(server, clients)


def _options(given: ServerOptions, triton: TritonOptions) -> Options:
    hosts = _host_policies(given.host_policy or ())
    gpus = visible(os.environ)
    batches = _default_batches(given.backend_config or ())
    rules = Rules(
        gpus=tuple(range(max((len(gpus), *(len(host.gpus) for host in hosts.values()))))),
        gpu_backends=computing(),
        max_batch_default=batches.pop("", Rules().max_batch_default),
        max_batch_of=batches,
        auto_complete=not (given.disable_auto_complete_config or _on(given.strict_model_config)),
        allow_pickle=frozenset(given.allow_pickle or ()),
        config_name=given.model_config_name,
    )
    control = Control(given.model_control_mode)
    if given.load_model and control is not Control.EXPLICIT:
        raise UserError(
            f"--load-model needs --model-control-mode explicit: '{control}' serves all models.",
            WRONG_USAGE,
        )
    return Options(
        repositories=tuple(folder.absolute() for folder in given.repository or ()),
        control=control,
        linked=tuple(folder.absolute() for folder in given.allow_links_to or ()),
        startup=tuple(given.load_model or ()),
        poll_s=float(given.repository_poll_secs),
        strict_readiness=_on(given.strict_readiness),
        rules=rules,
        drain_s=float(given.exit_timeout_secs),
        loads_max=given.model_load_thread_count,
        cache_bytes=_cache_bytes(given.cache_config, triton.response_cache_byte_size),
        memory_bytes=_read("--memory-budget", size, given.memory_budget) if given.memory_budget else 0,
        strings_max=given.max_string_elements,
        hang_s=float(given.hang_timeout_secs),
        rss_bytes_max=_read("--process-memory-limit", size, given.process_memory_limit or "0"),
        pinned=frozenset(given.pin or ()),
        limited=given.rate_limit == LIMITED,
        amounts=tuple(_read("--rate-limit-resource", amount, each) for each in given.rate_limit_resource or ()),
        hosts=hosts,
        gpus=gpus,
    )


def _on(switch: str) -> bool:
    return switch == "true"


def size(text: str) -> int:
    """Bytes of `1048576`, `512MiB` or `4G`; all units are powers of 1024. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("expected a size such as 1048576, 512MiB or 4GiB")
    return int(float(found[1]) * UNITS[found[2].lower()])


def amount(text: str) -> Amount:
    """A resource amount from `name:count` or `name:count:device`. Raises ValueError."""
    name, _, rest = text.partition(":")
    count, _, device = rest.partition(":")
    if not name or not count.isdigit() or not (device.isdigit() or not device):
        raise ValueError("expected NAME:COUNT or NAME:COUNT:DEVICE, such as R1:4")
    return Amount(name, int(count), int(device) if device else None)


def cpus(text: str) -> tuple[int, ...]:
    """CPU numbers from `0-3,8`. Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last.isdigit() or not last):
            raise ValueError("expected CPUs such as 0-3,8")
        if not int(first) <= int(last or first) < CPUS_MAX:
            raise ValueError(f"expected CPUs below {CPUS_MAX}, the lower one first, such as 0-3,8")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def tracing(pairs: Sequence[str]) -> Tracing:
    """Trace settings from `level=…`, `rate=…`, `count=…`, `triton,file=…` and `triton,log-frequency=…`."""
    levels: list[str] = []
    rate, count, frequency, file = 1000, -1, 0, ""
    for pair in pairs:
        mode, _, setting = pair.rpartition(",")
        name, equals, value = setting.partition("=")
        if mode not in ("", "triton") or not equals:
            raise _wrong("--trace-config", pair, "expected NAME=VALUE or triton,NAME=VALUE")
        match name:
            case "level" if value in (TIMESTAMPS, TENSORS, OFF):
                levels = [] if value == OFF else [*levels, value]
            case "level":
                raise _wrong("--trace-config", pair, f"known levels are {TIMESTAMPS}, {TENSORS} and {OFF}")
            case "rate":
                rate = _read("--trace-config", _natural, value)
            case "count":
                count = -1 if value == "-1" else _read("--trace-config", _natural, value)
            case "log-frequency":
                frequency = _read("--trace-config", _natural, value)
            case "file":
                file = value
            case "mode" if value == "triton":
                pass
            case _:
                raise _wrong("--trace-config", pair, "known are level, rate, count, mode=triton, file, log-frequency")
    found = Tracing(tuple(level for level in (TIMESTAMPS, TENSORS) if level in levels), rate, count, frequency, file)
    if found.levels and found.flaw:
        raise UserError(f"--trace-config: {found.flaw}", WRONG_USAGE)
    return found


def _shown(pairs: Sequence[str]) -> LatencyMetrics:
    switches = {"counter_latencies": True, "summary_latencies": False, "histogram_latencies": False}
    quantiles: tuple[float, ...] = QUANTILES
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name == "summary_quantiles":
            quantiles = _quantiles(pair, value)
            continue
        if name not in switches or value not in ("true", "false"):
            known = f"{', '.join(switches)}, each =true or =false, and summary_quantiles"
            raise _wrong("--metrics-config", pair, f"known are {known}")
        switches[name] = _on(value)
    counters, summaries, histograms = switches.values()
    return LatencyMetrics(counters, summaries, histograms, quantiles)


def _quantiles(pair: str, text: str) -> tuple[float, ...]:
    """Quantiles in Triton's format: the allowed error of each has no effect here."""
    try:
        found = [tuple(map(float, each.split(":"))) for each in text.split(",")]
        if all(len(each) == 2 and 0 < each[0] < 1 for each in found):
            return tuple(each[0] for each in found)
    except ValueError:
        pass
    raise _wrong("--metrics-config", pair, "expected QUANTILE:ERROR,…, such as 0.5:0.05,0.99:0.001")


def _default_batches(pairs: Sequence[str]) -> dict[str, int]:
    """The default batch size by backend; empty: of all others."""
    return {
        backend: _read("--backend-config", _natural, value)
        for backend, name, value in backend_settings(pairs)
        if name == BATCH_DEFAULT
    }


def _cache_bytes(config: str | None, legacy: int) -> int:
    if not config:
        return legacy
    if legacy:
        raise UserError("--cache-config and --response-cache-byte-size are the same: give only one.", WRONG_USAGE)
    return _cache(config)


def _cache(text: str) -> int:
    name, _, setting = text.partition(",")
    key, _, value = setting.partition("=")
    if name != "local" or key != "size":
        raise _wrong("--cache-config", text, "expected local,size=BYTES")
    return _read("--cache-config", size, value)


def _host_policies(texts: Sequence[str]) -> dict[str, Placement]:
    """Several options may belong to the same policy."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        name, _, setting = text.partition(",")
        key, _, value = setting.partition("=")
        if not name or not value or key not in ("cpu-cores", "numa-node", "gpus"):
            raise _wrong("--host-policy", text, "expected NAME,cpu-cores=0-3, NAME,numa-node=0 or NAME,gpus=UUID,…")
        found.setdefault(name, {})[key] = value
    return {
        name: Placement(
            cpus=_read("--host-policy", _own_cpus, settings["cpu-cores"]) if "cpu-cores" in settings else (),
            numa_node=_read("--host-policy", _numa_node, settings["numa-node"]) if "numa-node" in settings else -1,
            gpus=tuple(filter(None, settings.get("gpus", "").split(","))),
        )
        for name, settings in found.items()
    }


def _own_cpus(text: str) -> tuple[int, ...]:
    found, own = cpus(text), os.sched_getaffinity(0)
    if not own.intersection(found):
        raise ValueError(f"this process may run on none of them, only on {', '.join(map(str, sorted(own)))}")
    return found


def _numa_node(text: str) -> int:
    node = _natural(text)
    if not has_node(node):
        raise ValueError("this machine has no such NUMA node")
    return node


def _name_pattern(text: str) -> re.Pattern[str]:
    """A pattern of header names: case-insensitive, as in Triton, unless it begins with `(?-i)`. Raises `re.error`."""
    return re.compile(text.removeprefix("(?-i)"), 0 if text.startswith("(?-i)") else re.IGNORECASE)


def _natural(text: str) -> int:
    if not text.isdigit():
        raise ValueError("expected a whole number")
    return int(text)


def _read(option: str, read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except (ValueError, OverflowError, re.error) as error:
        raise _wrong(option, text, str(error)) from None


def _wrong(option: str, text: str, why: str) -> UserError:
    return UserError(f"{option}: found {text!r}; {why}", WRONG_USAGE)
