"""The cluster file as values: every setting is one field with its default, unit, bounds and sentence.

JSON Schema, documentation, `--set` flags and `FOREBAY_…` variables are derived from these fields. Reading the file,
and listing all problems at once, is `wire.clusterfile`.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from forebay.core import admission
from forebay.core import model as nouns
from forebay.core.deploy.settings import RolloutSettings, rollout_conflicts
from forebay.core.dispatch.settings import RouteSettings, StandInSettings, dispatch_conflicts
from forebay.core.engine_settings import ENGINES_OF, EngineSettings, named
from forebay.core.health.settings import HealthSettings, health_conflicts
from forebay.core.leading.settings import ControlSettings, control_conflicts
from forebay.core.model import Policy, Task
from forebay.core.placement.settings import NodeSettings, PlacementSettings, placement_conflicts
from forebay.core.registry.settings import RegistrySettings, encryption_conflicts, store_conflicts
from forebay.core.scaling.limits import ClusterLimits, limit_conflicts
from forebay.core.scaling.settings import Scale, ScaleSettings, scale_conflicts
from forebay.core.section import Conflict, Name, Section, sections
from forebay.core.tenancy import Quota, Tenant

SHA256_PATTERN = r"^[0-9a-f]{64}$"
Port = Annotated[int, Field(ge=1, le=65535)]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9.\-\[\]:]+)$")]


class LimitSettings(Section):
    """Bounds of the gateway's listener; what goes over one is refused with an error that names it."""

    header_bytes_max: Annotated[int, Field(ge=1024, le=1_048_576)] = nouns.Limits.header_bytes_max
    """Largest request head (request line and headers), bytes."""
    headers_max: Annotated[int, Field(ge=8, le=10_000)] = nouns.Limits.headers_max
    """Most header fields of a request."""
    body_bytes_max: Annotated[int, Field(ge=1024, le=1_073_741_824)] = nouns.Limits.body_bytes_max
    """Largest request body, bytes."""
    bodies_bytes_max: Annotated[int, Field(ge=1024, le=1_099_511_627_776)] = nouns.Limits.bodies_bytes_max
    """Most bytes that the bodies may have together that one gateway process is reading; those of up to 64 KiB do not
    count. A request that comes on top is answered with 503."""
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


class RecordSettings(Section):
    """What each gateway process writes down of finished requests, below `FOREBAY_HOME/run/NAME/records`."""

    decisions: bool = nouns.RecordsSpec.decisions
    """Keep a record of how each request was routed and what came of it; `forebay explain` shows it."""
    decision_files_max: Annotated[int, Field(ge=1, le=10_000)] = nouns.RecordsSpec.decision_files_max
    """Files of decision records that are kept; the oldest are removed."""
    audit: bool = nouns.RecordsSpec.audit
    """Keep the audit log: who called which model when, from where, with what outcome. A gateway that is killed loses
    what it had not written yet, about a second, and says so in the log when it comes up. Without the log it says
    nothing, and forgets the usage of its last seconds."""
    audit_files_max: Annotated[int, Field(ge=0, le=1_000_000)] = nouns.RecordsSpec.audit_files_max
    """Files of the audit log that are kept; that older ones were removed is a line of the log. 0: keep all."""
    file_bytes_max: Annotated[int, Field(ge=65_536, le=1_073_741_824)] = nouns.RecordsSpec.file_bytes_max
    """Largest file of either kind, bytes; then the next one is begun."""
    prompts: bool = nouns.RecordsSpec.prompts
    """Store the bodies of requests in the audit log."""


class TlsSettings(Section):
    """HTTPS. Both files are read again when they change; open connections go on."""

    certificate: Annotated[str, Field(min_length=1)]
    """PEM file of the server's certificate, followed by the chain that leads to its CA."""
    key: Annotated[str, Field(min_length=1)]
    """PEM file of the private key that belongs to the certificate, without a password."""

    def value(self) -> nouns.TlsSpec:
        """The files as they are written: a relative path starts where `forebay` does."""
        return nouns.TlsSpec(self.certificate, self.key)


class GatewaySettings(Section):
    """The public endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8080
    """Port to listen on."""
    auth: Literal["off", "open", "keys"] = "off"
    """`keys`: a request needs an API key of one of `tenants`. `off`: it needs none, so `host` has to be loopback.
    `open`: it needs none wherever it comes from."""
    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """Where the API keys are kept (their digests only); none: `keys.json` below `FOREBAY_HOME/run/NAME`."""
    tls: TlsSettings | None = None
    """Certificate and key; none: plain HTTP."""
    cors_origins: tuple[Origin, ...] = ()
    """Web pages that browsers let use the API (CORS), by origin: `https://app.example`, or `*` for all. With
    `auth: off` any of these pages, opened on this machine, may use the models."""
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
    records: RecordSettings = RecordSettings()
    """What is written down of finished requests."""


class AdminSettings(Section):
    """The admin API: status, metrics, rollouts, the registry."""

    host: str = "127.0.0.1"
    """Address to listen on. It speaks plain HTTP: past this machine, put TLS before it."""
    port: Port = 8081
    """Port to listen on."""
    auth: Literal["off", "keys"] = "off"
    """`keys`: a request needs a key of `forebay keys create --admin ROLE`. `off`: it needs none, so `host` has to be
    loopback; the account that runs Forebay, and root, may do everything, others of this machine may look."""
    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """Where these keys are kept (their digests only); none: `admin-keys.json` below `FOREBAY_HOME/run/NAME`."""


class Slo(Section):
    """What users of the model are promised; `forebay status` and metrics report against it."""

    availability: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of requests that must succeed, for example 0.999."""
    ttft_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """Time to first token, 99th percentile, milliseconds. Who is due by it goes before who may wait longer."""
    drop_late: bool = False
    """A request without a first token after `ttft_p99_ms` is refused (`deadline_exceeded`) where it still waits, so
    that those who can be served in time are. Not batch work, nor what comes while no replica is ready."""
    tpot_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """Time per output token after the first, 99th percentile, milliseconds."""
    latency_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """End-to-end time of a request, 99th percentile, milliseconds."""


class ModelSettings(Section):
    """One model: where it comes from, what runs it, how many replicas, what is promised."""

    name: Name
    """The name that clients put into `model`."""
    task: Task
    """`chat` (chat and text completions), `embed` (embeddings) or `tensor` (the Open Inference Protocol)."""
    source: Annotated[str, Field(min_length=1, examples=["./model.gguf", "package:DIST==VERSION/PATH"])]
    """`package:DIST[==VERSION]/PATH`, `s3://BUCKET/PATH`, `hf://ORGANISATION/NAME[@REVISION][/PATH]`,
    `mlflow:MODEL@ALIAS`, `registry:MODEL@REVISION` (or an alias of one), or the path of a file or folder (GGUF, ONNX,
    OpenVINO IR; for `task: tensor` a model repository, the folder of one of its models, or a bare model file)."""
    sha256: Annotated[str, Field(pattern=SHA256_PATTERN)] | None = None
    """Checksum of the file (of `model.onnx` in a folder); a source that differs is refused."""
    engine: Annotated[EngineSettings, BeforeValidator(named)] | None = None
    """The engine by name, or a section with `name` and its settings; default: chosen from the source."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """How many replicas to keep running; with `scale`, how many to begin with."""
    scale: ScaleSettings | None = None
    """How many replicas there are follows from the load; none: always `replicas`."""
    standby: Annotated[int, Field(ge=0, le=100)] = 0
    """How many more to keep running, loaded and without requests: one of them steps in at once for a replica that
    fails, or when more are wanted."""
    spares: Annotated[int, Field(ge=0, le=100)] | Literal["auto"] = 0
    """The same for failures alone; the larger one of both counts. `auto`: as many as `slo.availability` takes by the
    failures and repairs there have been; `forebay sla` shows the arithmetic."""
    cached: bool = False
    """Keep its files in the machine's memory (page cache), as far as half of what is available goes, so that starting
    replicas do not wait for the disk: for models that may be without replicas."""
    routing: Policy = Policy.CPR
    """How gateways pick a replica."""
    hedge_after_s: Annotated[float, Field(gt=0, le=60)] | None = None
    """Embeddings, tensors and token counts without an answer after this time go to a second replica too, seconds; the
    first answer counts. About the p95 latency is a good value. None: never."""
    sessions: nouns.Sessions = nouns.Sessions.OFF
    """`header`: requests with the same `x-forebay-session` go to the same replica as long as it is healthy, whatever
    `routing` says, and wait when it is full. `cookie`: so do those with the cookie `forebay-session`, which every
    client without one is given."""
    queue_max: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """Most requests that wait in a gateway while no replica has room."""
    queue_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest wait in that queue, seconds; five times as long for `batch` work. Who has had to give way or lost
    its replica may wait anew."""
    engine_hang_s: Annotated[float, Field(gt=0.5, le=3600)] = nouns.WorkerSpec.engine_hang_s
    """An engine that owes answers and gives no sign of life for this long is replaced, seconds."""
    drain_grace_s: Annotated[float, Field(ge=0, le=3600)] = nouns.WorkerSpec.drain_grace_s
    """Time that running requests get to finish when a replica stops, seconds."""
    slo: Slo = Slo()
    """Targets."""
    fallback: tuple[StandInSettings, ...] = ()
    """Models that serve its requests when it cannot, the first one first: names, or sections. Not those about tokens
    (`/v1/tokenize`, `count_tokens`, ids as a prompt): another model has another vocabulary."""
    fallback_default: Literal["allow", "deny"] = "allow"
    """Whether they may, for a request that does not say so with the header `x-forebay-fallback`."""
    price_per_mtok: Annotated[float, Field(ge=0)] | None = None
    """Price of a million tokens, in the unit of the header `x-forebay-max-cost`."""
    rollout: RolloutSettings = RolloutSettings()
    """How new revisions come to serve."""

    placement: PlacementSettings = PlacementSettings()
    """Where its replicas run."""

    def scaling(self) -> Scale | None:
        """How the model is scaled; None: it has a fixed number of replicas."""
        times = (self.slo.ttft_p99_ms, self.slo.tpot_p99_ms, self.slo.latency_p99_ms)
        ttft_s, tpot_s, latency_s = (None if time_ms is None else time_ms / 1000 for time_ms in times)
        return None if self.scale is None else self.scale.value(ttft_s, tpot_s, latency_s)


Band = Literal["system", "interactive", "default", "batch"]
Limit = Annotated[int, Field(ge=1, le=1_000_000_000_000)]


class QuotaSettings(Section):
    """What a tenant may use, over all gateway processes together. Each limit is at least `gateway.processes`."""

    requests_per_min: Limit | None = None
    """Requests in any 60 seconds; none: as many as there is room for."""
    tokens_per_min: Limit | None = None
    """Tokens in any 60 seconds, prompts and answers. A request counts as its estimate until it ends."""
    streams_max: Limit | None = None
    """Streams that are open at once."""
    tokens_per_day: Limit | None = None
    """Tokens from midnight to midnight, UTC."""


class TenantSettings(Section):
    """A client of the cluster. `forebay keys create --tenant NAME` makes its API keys."""

    name: Name
    """Name of the tenant."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Models it may use: names, or patterns with `*`."""
    band: Band = "default"
    """How urgent its requests are if they do not say."""
    band_max: Band | None = None
    """The most urgent band that a request may ask for; none: `band`."""
    limits: QuotaSettings = QuotaSettings()
    """What it may use."""

    def value(self) -> Tenant:
        """The tenant as gateways know it."""
        band = admission.Band[self.band.upper()]
        band_max = admission.Band[self.band_max.upper()] if self.band_max else band
        return Tenant(self.name, self.models, band, band_max, Quota(**self.limits.model_dump()))


class Cluster(Section):
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
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names of models, or of names in `routes`, for clients to use."""
    routes: tuple[RouteSettings, ...] = ()
    """Rules that choose a model by what a request is like."""
    nodes: tuple[NodeSettings, ...] = ()
    """Machines, or parts of this one, that replicas run on; none: one node `local`, this machine."""
    limits: ClusterLimits = ClusterLimits()
    """What the replicas of all models may have together; if they want more, each has its `min` and a fair share."""
    health: HealthSettings = HealthSettings()
    """How the GPUs are."""
    tenants: tuple[TenantSettings, ...] = ()
    """Who may use them, with `gateway.auth: keys`."""
    store: str | None = None
    """Where the registry and the history are kept: `sqlite:///PATH` or `postgresql://USER@HOST/NAME`; none: the file
    `forebay.db` below `FOREBAY_HOME`."""
    control: ControlSettings = ControlSettings()
    """What watches over the replicas."""
    registry: RegistrySettings = RegistrySettings()
    """Registered models."""

    @model_validator(mode="after")
    def _parts_fit(self) -> "Cluster":
        found = conflicts(self.model_dump(mode="json"))
        if found:
            raise ValueError("; ".join(f"{c.path}: {c.found}; allowed: {c.allowed}" for c in found))
        return self


RESERVED_NAMES = ("gateway",)
"""Names of units that are not replicas: `gateway-0` is the first gateway process."""


def conflicts(raw: Mapping[str, Any]) -> tuple[Conflict, ...]:
    """All conflicts in a cluster given as plain data. Parts of a wrong type are skipped: others report those."""
    models, tenants = sections(raw.get("models")), sections(raw.get("tenants"))
    gateway = raw.get("gateway")
    gateway = gateway if isinstance(gateway, Mapping) else {}
    return (
        *_reserved_names(models),
        *_same_names("models", models),
        *_engine_conflicts(models),
        *_source_conflicts(models),
        *_promise_conflicts(models),
        *_port_conflicts(raw),
        *_auth_conflicts(gateway, raw.get("tenants", [])),
        *_admin_conflicts(raw.get("admin")),
        *_same_names("tenants", tenants),
        *_tenant_conflicts(tenants, models),
        *_limit_conflicts(tenants, gateway.get("processes", 1)),
        *store_conflicts(raw.get("store")),
        *control_conflicts(raw),
        *encryption_conflicts(raw.get("registry")),
        *dispatch_conflicts(raw),
        *rollout_conflicts(raw),
        *scale_conflicts(raw),
        *limit_conflicts(raw),
        *placement_conflicts(raw),
        *health_conflicts(raw),
    )


def _reserved_names(models: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    for index, section in enumerate(models):
        name = section.get("name")
        if name in RESERVED_NAMES:
            path = f"models[{index}].name"
            yield Conflict(path, f'"{name}"', f'any other name: "{name}" is taken by Forebay itself')


def _same_names(key: str, sections: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    first: dict[str, int] = {}
    for index, section in enumerate(sections):
        name = section.get("name")
        if not isinstance(name, str):
            continue
        if name in first:
            found = f'"{name}", the name of {key}[{first[name]}] too'
            yield Conflict(f"{key}[{index}].name", found, f"a name that no other {key.removesuffix('s')} has")
        first.setdefault(name, index)


def _engine_conflicts(sections: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    known = [name for names in ENGINES_OF.values() for name in names]  # of a name that is a list no hash is taken
    for index, section in enumerate(sections):
        engine, task = named(section.get("engine")), section.get("task")
        name = engine.get("name") if isinstance(engine, Mapping) else None
        if name not in known or task not in list(Task):
            continue
        fitting = ENGINES_OF[Task(task)]
        if name not in fitting:
            allowed = f"{' or '.join(fitting)}, for `task: {task}`"
            yield Conflict(f"models[{index}].engine.name", f'"{name}"', allowed)


def _source_conflicts(sections: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    """The engine without a model needs no source, which looks like one if the engine is forgotten."""
    for index, section in enumerate(sections):
        if section.get("source") == "synthetic" and section.get("engine") is None and section.get("task") != "tensor":
            allowed = "`engine: synthetic`, which needs no model; a file of that name is `source: ./synthetic`"
            yield Conflict(f"models[{index}].engine", "nothing, beside `source: synthetic`", allowed)


def _promise_conflicts(sections: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    for index, section in enumerate(sections):
        slo = section.get("slo")
        slo = slo if isinstance(slo, Mapping) else {}
        if slo.get("drop_late") is True and slo.get("ttft_p99_ms") is None:
            yield Conflict(
                f"models[{index}].slo.drop_late", "true", "false, or `ttft_p99_ms` beside it, the deadline"
            )
        if section.get("spares") == "auto" and not slo.get("availability"):
            allowed = "a number, or `slo.availability` beside it, which they are to keep"
            yield Conflict(f"models[{index}].spares", '"auto"', allowed)


def _port_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    gateway, admin = (_port(raw.get("gateway"), GatewaySettings), _port(raw.get("admin"), AdminSettings))
    if gateway == admin:
        yield Conflict("admin.port", f"{admin}, the port of the gateway too", "a port of its own")


def _port(section: Any, settings: type[GatewaySettings] | type[AdminSettings]) -> Any:
    default = settings.model_fields["port"].default
    return section.get("port", default) if isinstance(section, Mapping) else default


def _auth_conflicts(gateway: Mapping[str, Any], tenants: Any) -> Iterator[Conflict]:
    auth = gateway.get("auth", GatewaySettings.model_fields["auth"].default)
    host = gateway.get("host", GatewaySettings.model_fields["host"].default)
    if auth == "keys" and tenants == []:
        yield Conflict("tenants", "nothing", "at least one tenant, as `gateway.auth: keys` asks for their keys")
    if auth in ("off", "open") and tenants and isinstance(tenants, Sequence):
        yield Conflict("gateway.auth", f'"{auth}" beside tenants', '"keys", without which their limits mean nothing')
    if auth == "off" and isinstance(host, str) and not is_loopback(host):
        allowed = (
            "127.0.0.1, as everybody may use a gateway with `auth: off`; for another address ask for keys with "
            "`gateway.auth: keys`, or write `gateway.auth: open` if everybody is meant"
        )
        yield Conflict("gateway.host", f'"{host}"', allowed)


def _admin_conflicts(admin: Any) -> Iterator[Conflict]:
    host = admin.get("host") if isinstance(admin, Mapping) and admin.get("auth", "off") == "off" else None
    if isinstance(host, str) and not is_loopback(host):
        allowed = "127.0.0.1, or any other one with `admin.auth: keys`: who reaches it can change the cluster"
        yield Conflict("admin.host", f'"{host}"', allowed)


def is_loopback(host: str) -> bool:
    """Whether an address, or the name of one, is reached from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tenant_conflicts(
    tenants: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]
) -> Iterator[Conflict]:
    names = [model["name"] for model in models if isinstance(model.get("name"), str)]
    for index, tenant in enumerate(tenants):
        patterns = tenant.get("models", [])
        for place, pattern in enumerate(patterns if isinstance(patterns, list) else []):
            if isinstance(pattern, str) and not any(fnmatchcase(name, pattern) for name in names):
                allowed = f"`*`, or what fits the name of a model: {', '.join(names) or 'there is none'}"
                yield Conflict(f"tenants[{index}].models[{place}]", f'"{pattern}"', allowed)
        band, band_max = tenant.get("band", "default"), tenant.get("band_max")
        known = get_args(Band)
        if band in known and band_max in known and known.index(band) < known.index(band_max):
            allowed = f'"{band}", the `band` of the tenant, or a more urgent one'
            yield Conflict(f"tenants[{index}].band_max", f'"{band_max}"', allowed)


def _limit_conflicts(tenants: Sequence[Mapping[str, Any]], processes: Any) -> Iterator[Conflict]:
    if not isinstance(processes, int):
        return
    for index, tenant in enumerate(tenants):
        limits = tenant.get("limits")
        for key in QuotaSettings.model_fields:
            limit = limits.get(key) if isinstance(limits, Mapping) else None
            if isinstance(limit, int) and 1 <= limit < processes:
                allowed = f"at least {processes}, so that each of the `gateway.processes` can give out one"
                yield Conflict(f"tenants[{index}].limits.{key}", str(limit), allowed)
