"""The cluster file as values: every setting is one field with its default, unit, bounds and sentence.

JSON Schema, documentation, `--set` flags and `FOREBAY_…` variables are derived from these fields. Reading the file,
and listing all problems at once, is `wire.clusterfile`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from forebay.core import model as nouns
from forebay.core.model import Policy, Task

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
SHA256_PATTERN = r"^[0-9a-f]{64}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Port = Annotated[int, Field(ge=1, le=65535)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class LimitSettings(_Section):
    """Bounds of the gateway's listener; what goes over one is refused with an error that names it."""

    header_bytes_max: Annotated[int, Field(ge=1024, le=1_048_576)] = nouns.Limits.header_bytes_max
    """Largest request head (request line and headers), bytes."""
    headers_max: Annotated[int, Field(ge=8, le=10_000)] = nouns.Limits.headers_max
    """Most header fields of a request."""
    body_bytes_max: Annotated[int, Field(ge=1024, le=1_073_741_824)] = nouns.Limits.body_bytes_max
    """Largest request body, bytes."""
    connections_max: Annotated[int, Field(ge=1, le=1_000_000)] = nouns.Limits.connections_max
    """Most open client connections of one gateway process."""
    head_timeout_s: Annotated[float, Field(gt=0, le=3600)] = nouns.Limits.head_timeout_s
    """Time a client has to send a whole request head, seconds."""
    body_timeout_s: Annotated[float, Field(gt=0, le=3600)] = nouns.Limits.body_timeout_s
    """Time a client has to send a whole request body, seconds."""
    idle_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = nouns.Limits.idle_timeout_s
    """A kept-alive connection without a request is closed after this, seconds."""
    write_timeout_s: Annotated[float, Field(gt=0, le=3600)] = nouns.Limits.write_timeout_s
    """A client that reads nothing of its answer for this long is cut off, seconds."""


class GatewaySettings(_Section):
    """The public endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8080
    """Port to listen on."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Gateway processes that share the port (SO_REUSEPORT)."""
    retries_max: Annotated[int, Field(ge=0, le=10)] = nouns.GatewaySpec.retries_max
    """How often a request is tried on another replica while no byte of an answer has been sent."""
    replica_timeout_s: Annotated[float, Field(gt=0.1, le=300)] = nouns.GatewaySpec.replica_timeout_s
    """A replica that answers no load poll for this long is taken as lost, seconds."""
    drain_grace_s: Annotated[float, Field(ge=0, le=3600)] = nouns.GatewaySpec.drain_grace_s
    """Time that running requests get to finish when the gateway stops, seconds."""
    limits: LimitSettings = LimitSettings()
    """Bounds of the listener."""


class AdminSettings(_Section):
    """The admin API: status, metrics, later the console."""

    host: str = "127.0.0.1"
    """Address to listen on. Keep it on loopback: the admin API has no login yet."""
    port: Port = 8081
    """Port to listen on."""


class Slo(_Section):
    """What users of the model are promised; `forebay status` and metrics report against it."""

    availability: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of requests that must succeed, for example 0.999."""
    ttft_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """Time to first token, 99th percentile, milliseconds."""
    tpot_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """Time per output token after the first, 99th percentile, milliseconds."""
    latency_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """End-to-end time of a request, 99th percentile, milliseconds."""


class OpenVinoSettings(_Section):
    """LLMs on CPU through OpenVINO GenAI: continuous batching, prefix cache."""

    name: Literal["openvino"] = "openvino"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Inference threads; 0: all cores."""
    kv_cache_tokens: Annotated[int, Field(ge=256, le=100_000_000)] = 32_768
    """Size of the KV cache, tokens."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 32
    """Sequences that run at once; more wait in the worker."""
    prefix_cache: bool = True
    """Keep the KV blocks of finished requests for prompts that begin alike."""
    convert: Literal["auto", "never"] = "auto"
    """`auto`: GGUF files of a type that OpenVINO renders inexactly (Q4_1) are converted to Q8_0 once and cached."""


class LlamaCppSettings(_Section):
    """Any GGUF through llama.cpp (package xllamacpp)."""

    name: Literal["llamacpp"] = "llamacpp"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Inference threads; 0: all cores."""
    kv_cache_tokens: Annotated[int, Field(ge=256, le=100_000_000)] = 32_768
    """Size of the KV cache, tokens, shared by all slots."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Slots: sequences that run at once; more wait in the worker."""


class OnnxSettings(_Section):
    """Embedding models through ONNX Runtime with dynamic batching."""

    name: Literal["onnx"] = "onnx"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Inference threads; 0: all cores."""
    max_batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Largest batch."""
    max_delay_ms: Annotated[float, Field(ge=0, le=10_000)] = 2.0
    """How long a batch that is not full may wait for more, milliseconds."""
    queue_max: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Most inputs that wait for a batch."""
    pooling: Literal["auto", "cls", "mean"] = "auto"
    """How token vectors become one vector; `auto` reads 1_Pooling/config.json, else `cls`."""
    normalize: bool = True
    """Scale vectors to length 1."""


class SyntheticSettings(_Section):
    """An engine without a model: deterministic text or vectors on a stated time model. For tests and dry runs."""

    name: Literal["synthetic"] = "synthetic"
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Sequences that run at once."""
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 50_000.0
    """Prompt tokens processed per second."""
    step_ms: Annotated[float, Field(ge=0)] = 1.0
    """Duration of a decode step, milliseconds."""
    kv_cache_tokens: Annotated[int, Field(ge=256, le=100_000_000)] = 262_144
    """Size of the pretended KV cache, tokens."""
    dimensions: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Length of the pretended embeddings."""


EngineSettings = Annotated[
    OpenVinoSettings | LlamaCppSettings | OnnxSettings | SyntheticSettings, Field(discriminator="name")
]


def _named(value: Any) -> Any:
    """`engine: llamacpp` is short for `engine: {name: llamacpp}`."""
    return {"name": value} if isinstance(value, str) else value


class ModelSettings(_Section):
    """One model: where it comes from, what runs it, how many replicas, what is promised."""

    name: Name
    """The name that clients put into `model`."""
    task: Task
    """`chat` (chat and text completions) or `embed` (embeddings)."""
    source: Annotated[str, Field(min_length=1)]
    """`package:DIST[==VERSION]/PATH`, or the path of a file or folder (GGUF, ONNX, OpenVINO IR)."""
    sha256: Annotated[str, Field(pattern=SHA256_PATTERN)] | None = None
    """Checksum of the file (of `model.onnx` in a folder); a source that differs is refused."""
    engine: Annotated[EngineSettings, BeforeValidator(_named)] | None = None
    """The engine by name, or a section with `name` and its settings; default: chosen from the source."""
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """How many replicas to keep running."""
    routing: Policy = Policy.CPR
    """How gateways pick a replica."""
    queue_max: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """Most requests that wait in a gateway while no replica has room."""
    queue_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest wait in that queue, seconds."""
    engine_hang_s: Annotated[float, Field(gt=0.5, le=3600)] = nouns.WorkerSpec.engine_hang_s
    """An engine that owes answers and gives no sign of life for this long is replaced, seconds."""
    drain_grace_s: Annotated[float, Field(ge=0, le=3600)] = nouns.WorkerSpec.drain_grace_s
    """Time that running requests get to finish when a replica stops, seconds."""
    slo: Slo = Slo()
    """Targets."""


class Cluster(_Section):
    """A Forebay cluster: the whole content of `forebay.yaml`."""

    name: Name = "forebay"
    """Name of the cluster; its run-time state lives under `FOREBAY_HOME/run/NAME`."""
    gateway: GatewaySettings = GatewaySettings()
    """The public endpoint."""
    admin: AdminSettings = AdminSettings()
    """The admin API."""
    worker_port_first: Port = 8100
    """Workers take the first free port at or above this one."""
    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1)]
    """The models to serve."""

    @model_validator(mode="after")
    def _parts_fit(self) -> "Cluster":
        found = conflicts(self.model_dump(mode="json"))
        if found:
            raise ValueError("; ".join(f"{c.path}: {c.found}; allowed: {c.allowed}" for c in found))
        return self


class Conflict(NamedTuple):
    """Two settings, each fine alone, that do not go together."""

    path: str
    found: str
    allowed: str


ENGINES_OF: dict[Task, tuple[str, ...]] = {
    Task.CHAT: ("openvino", "llamacpp", "synthetic"),
    Task.EMBED: ("onnx", "synthetic"),
}
RESERVED_NAMES = ("gateway",)
"""Names of units that are not replicas: `gateway-0` is the first gateway process."""


def conflicts(raw: Mapping[str, Any]) -> tuple[Conflict, ...]:
    """All conflicts in a cluster given as plain data. Parts of a wrong type are skipped: others report those."""
    models = raw.get("models")
    sections = [m if isinstance(m, Mapping) else {} for m in models] if isinstance(models, Sequence) else []
    return (*_name_conflicts(sections), *_engine_conflicts(sections), *_port_conflicts(raw))


def _name_conflicts(sections: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    first: dict[str, int] = {}
    for index, section in enumerate(sections):
        name = section.get("name")
        if not isinstance(name, str):
            continue
        path = f"models[{index}].name"
        if name in RESERVED_NAMES:
            yield Conflict(path, f'"{name}"', f'any other name: "{name}" is taken by Forebay itself')
        if name in first:
            yield Conflict(path, f'"{name}", the name of models[{first[name]}] too', "a name that no other model has")
        first.setdefault(name, index)


def _engine_conflicts(sections: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    known = {name for names in ENGINES_OF.values() for name in names}
    for index, section in enumerate(sections):
        engine, task = _named(section.get("engine")), section.get("task")
        name = engine.get("name") if isinstance(engine, Mapping) else None
        if name not in known or task not in list(Task):
            continue
        fitting = ENGINES_OF[Task(task)]
        if name not in fitting:
            allowed = f"{' or '.join(fitting)}, for `task: {task}`"
            yield Conflict(f"models[{index}].engine.name", f'"{name}"', allowed)


def _port_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    gateway, admin = (_port(raw.get("gateway"), GatewaySettings), _port(raw.get("admin"), AdminSettings))
    if gateway == admin:
        yield Conflict("admin.port", f"{admin}, the port of the gateway too", "a port of its own")


def _port(section: Any, settings: type[GatewaySettings] | type[AdminSettings]) -> Any:
    default = settings.model_fields["port"].default
    return section.get("port", default) if isinstance(section, Mapping) else default
