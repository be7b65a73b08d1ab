"""The cluster file as values: every setting is a field with its default, unit, bounds and description.

JSON Schema, documentation, `--set` flags and `FOREBAY_…` variables are derived from these fields. `wire.clusterfile`
reads the file and reports all problems at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address, ip_network
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from forebay.core import admission
from forebay.core import model as nouns
from forebay.core.deploy.settings import RolloutSettings, rollout_conflicts
from forebay.core.dispatch.settings import RouteSettings, StandInSettings, dispatch_conflicts
from forebay.core.engine_settings import ENGINES_OF, EngineSettings, named
from forebay.core.errors import Conflict
from forebay.core.health.settings import HealthSettings, health_conflicts
from forebay.core.leading.settings import ControlSettings, control_conflicts
from forebay.core.model import Policy, Task
from forebay.core.placement.settings import NodeSettings, PlacementSettings, placement_conflicts
from forebay.core.registry.settings import RegistrySettings, encryption_conflicts, store_conflicts
from forebay.core.scaling.limits import ClusterLimits, limit_conflicts
from forebay.core.scaling.settings import Scale, ScaleSettings, scale_conflicts
from forebay.core.section import Name, Section, is_host, sections
from forebay.core.tenancy import Quota, Tenant

SHA256_PATTERN = r"^[0-9a-f]{64}$"
Port = Annotated[int, Field(ge=1, le=65535)]
ORIGIN_PATTERN = r"^(\*|https?://[A-Za-z0-9.\-\[\]:]+)$"
Origin = Annotated[str, Field(pattern=ORIGIN_PATTERN)]


class LimitSettings(Section):
    """Limits of the gateway's listener; what exceeds one is refused with an error that names it."""

    header_bytes_max: Annotated[int, Field(ge=1024, le=1_048_576)] = nouns.Limits.header_bytes_max
    """Largest request head (request line and headers), bytes."""
    headers_max: Annotated[int, Field(ge=8, le=10_000)] = nouns.Limits.headers_max
    """Most header fields in a request."""
    body_bytes_max: Annotated[int, Field(ge=1024, le=1_073_741_824)] = nouns.Limits.body_bytes_max
    """Largest request body, bytes."""
    bodies_bytes_max: Annotated[int, Field(ge=1024, le=1_099_511_627_776)] = nouns.Limits.bodies_bytes_max
    """Most bytes of request bodies that one gateway process reads at once, not counting bodies of up to 64 KiB;
    further requests are answered with 503."""
    connections_max: Annotated[int, Field(ge=1, le=1_000_000)] = nouns.Limits.connections_max
    """Most open client connections of one gateway process."""
    head_timeout_s: Annotated[float, Field(gt=0, le=3600)] = nouns.Limits.head_timeout_s
    """Time a client has to send a whole request head, seconds."""
    body_timeout_s: Annotated[float, Field(gt=0, le=3600)] = nouns.Limits.body_timeout_s
    """Time a client has to send a whole request body, seconds."""
    idle_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = nouns.Limits.idle_timeout_s
    """A keep-alive connection without a request is closed after this, seconds."""
    write_timeout_s: Annotated[float, Field(gt=0, le=3600)] = nouns.Limits.write_timeout_s
    """A client that reads nothing of its answer for this long is disconnected, seconds."""


class RecordSettings(Section):
    """What each gateway process records about finished requests, below `FOREBAY_HOME/run/NAME/records`."""

    decisions: bool = nouns.RecordsSpec.decisions
    """Record how each request was routed and how it ended; `forebay explain` shows it."""
    decision_files_max: Annotated[int, Field(ge=1, le=10_000)] = nouns.RecordsSpec.decision_files_max
    """Number of decision record files to keep; the oldest are removed."""
    audit: bool = nouns.RecordsSpec.audit
    """Keep an audit log: who called which model, when, from where, with what outcome. A gateway that is killed loses
    what it had not yet written, about a second, and says so in the log when it restarts. Without the log it does not
    say so, and loses the usage figures of its last seconds."""
    audit_files_max: Annotated[int, Field(ge=0, le=1_000_000)] = nouns.RecordsSpec.audit_files_max
    """Number of audit log files to keep; the removal of older ones is itself logged. 0: keep all."""
    file_bytes_max: Annotated[int, Field(ge=65_536, le=1_073_741_824)] = nouns.RecordsSpec.file_bytes_max
    """Size at which a file of either kind is rotated, bytes."""
    prompts: bool = nouns.RecordsSpec.prompts
    """Store request bodies in the audit log."""


class TlsSettings(Section):
    """HTTPS. Both files are reloaded when they change; open connections are kept."""

    certificate: Annotated[str, Field(min_length=1)]
    """PEM file with the server certificate, followed by its chain."""
    key: Annotated[str, Field(min_length=1)]
    """PEM file with the certificate's private key, without a password."""

    def value(self) -> nouns.TlsSpec:
        """The files as given; relative paths are resolved from where `forebay` runs."""
        return nouns.TlsSpec(self.certificate, self.key)


class GatewaySettings(Section):
    """The public endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8080
    """Port to listen on."""
    auth: Literal["off", "open", "keys"] = "off"
    """`keys`: a request needs an API key of one of `tenants`. `off`: no key is needed, so `host` must be loopback.
    `open`: no key is needed on any address."""
    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """File that stores the digests of API keys; none: `keys.json` below `FOREBAY_HOME/run/NAME`."""
    metrics: Literal["keys", "local", "open"] = nouns.GatewaySpec.metrics
    """Who may read `/metrics`, and the names of models and replicas in `/readyz`. `local`: clients on this machine,
    over loopback and through no proxy. `keys`: those, and with `auth: keys` the API keys of tenants that may use all
    models, else everyone. `open`: everyone."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks of proxies, such as `10.0.0.0/8`, whose `x-forwarded-for` is believed: the audit log and canaries then
    tell clients apart by the last address in it that is in none of these networks. Other proxies count as clients."""
    tls: TlsSettings | None = None
    """Certificate and key; none: plain HTTP."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may use the API (CORS), such as `https://app.example`, or `*` for all. With
    `auth: off`, any of these pages opened on this machine may use the models; pages that it does not serve itself and
    that are not listed are rejected."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Gateway processes that share the port (SO_REUSEPORT)."""
    retries_max: Annotated[int, Field(ge=0, le=10)] = nouns.GatewaySpec.retries_max
    """How often a request is retried on another replica while no byte of an answer has been sent."""
    replica_timeout_s: Annotated[float, Field(gt=0.1, le=300)] = nouns.GatewaySpec.replica_timeout_s
    """A replica that answers no load poll for this long is considered lost, seconds."""
    drain_grace_s: Annotated[float, Field(ge=0, le=3600)] = nouns.GatewaySpec.drain_grace_s
    """Time that running requests get to finish when the gateway stops, seconds."""
    limits: LimitSettings = LimitSettings()
    """Limits of the listener."""
    records: RecordSettings = RecordSettings()
    """What is recorded about finished requests."""


class AdminSettings(Section):
    """The admin API: status, metrics, rollouts, the registry."""

    host: str = "127.0.0.1"
    """Address to listen on. It speaks plain HTTP: beyond this machine, put a TLS proxy in front of it."""
    port: Port = 8081
    """Port to listen on."""
    auth: Literal["off", "keys"] = "off"
    """`keys`: a request needs a key of `forebay keys create --admin ROLE`. `off`: no key is needed, so `host` must be
    loopback; the account that runs Forebay and root may do everything, other local accounts may only read."""
    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """File that stores the digests of these keys; none: `admin-keys.json` below `FOREBAY_HOME/run/NAME`."""


class Slo(Section):
    """The model's service level objective; `forebay sla` reports against it."""

    availability: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of requests that must succeed, for example 0.999."""
    ttft_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """Time to first token, 99th percentile, milliseconds. In the queue, requests that are due earlier go first."""
    drop_late: bool = False
    """Refuse (`deadline_exceeded`) requests that are still waiting after `ttft_p99_ms`, so that those which can be
    served in time are. Batch work is exempt, and so are requests that arrive while no replica is ready."""
    tpot_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """Time per output token after the first, 99th percentile, milliseconds."""
    latency_p99_ms: Annotated[float, Field(gt=0)] | None = None
    """End-to-end time of a request, 99th percentile, milliseconds."""


class ModelSettings(Section):
    """One model: its source, its engine, its replicas and its objectives."""

    name: Name
    """The name that clients put into `model`."""
    task: Task
    """`chat` (chat and text completions), `embed` (embeddings) or `tensor` (the Open Inference Protocol)."""
    source: Annotated[str, Field(min_length=1, examples=["./model.gguf", "package:DIST==VERSION/PATH"])]
    """`package:DIST[==VERSION]/PATH`, `s3://BUCKET/PATH`, `hf://ORGANISATION/NAME[@REVISION][/PATH]`,
    `mlflow:MODEL@ALIAS`, `registry:MODEL@REVISION` (or an alias of one), or the path of a file or folder (GGUF, ONNX,
    OpenVINO IR; for `task: tensor` a model repository, the folder of one of its models, or a bare model file)."""
    sha256: Annotated[str, Field(pattern=SHA256_PATTERN)] | None = None
    """SHA-256 of the file (of `model.onnx` in a folder); a source that differs is refused."""
    engine: Annotated[EngineSettings, BeforeValidator(named)] | None = None
    """The engine by name, or a section with `name` and its settings; default: chosen from the source."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Number of replicas; with `scale`, the initial number."""
    scale: ScaleSettings | None = None
    """Autoscaling; none: always `replicas`."""
    standby: Annotated[int, Field(ge=0, le=100)] = 0
    """Number of standby replicas, loaded but without requests: one takes over at once when a replica fails, or when
    more are wanted."""
    spares: Annotated[int, Field(ge=0, le=100)] | Literal["auto"] = 0
    """Standby replicas for failures alone; the larger of both numbers applies. `auto`: as many as `slo.availability`
    requires, given the failures and repairs seen so far; `forebay sla` shows the calculation."""
    cached: bool = False
    """Keep the model's files in the page cache, using at most half of the available memory, so that starting replicas
    do not wait for the disk: for models that may scale to zero."""
    routing: Policy = Policy.CPR
    """How gateways choose a replica."""
    hedge_after_s: Annotated[float, Field(gt=0, le=60)] | None = None
    """Send embedding, tensor and token count requests that have no answer after this time to a second replica too,
    seconds; the first answer is used. A good value is about the p95 latency. None: never."""
    sessions: nouns.Sessions = nouns.Sessions.OFF
    """`header`: requests with the same `x-forebay-session` go to the same replica while it is healthy, whatever
    `routing` says, and wait while it is full. `cookie`: likewise by the cookie `forebay-session`, which is set for
    every client that has none."""
    queue_max: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """Most requests that may wait in a gateway while no replica has room."""
    queue_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest wait in that queue, seconds; five times as long for `batch` work. It starts over for a request that
    lost its replica; one that was preempted waits for at most 600 s."""
    engine_hang_s: Annotated[float, Field(gt=0.5, le=3600)] = nouns.WorkerSpec.engine_hang_s
    """An engine that has work and does not respond for this long is replaced, seconds."""
    drain_grace_s: Annotated[float, Field(ge=0, le=3600)] = nouns.WorkerSpec.drain_grace_s
    """Time that running requests get to finish when a replica stops, seconds."""
    slo: Slo = Slo()
    """Targets."""
    fallback: tuple[StandInSettings, ...] = ()
    """Models that serve its requests when it cannot, in order: names, or sections. Requests that involve token ids
    (`/v1/tokenize`, `count_tokens`, ids as a prompt) are exempt, as another model has another vocabulary; so are
    sequences, whose state is in a replica."""
    fallback_default: Literal["allow", "deny"] = "allow"
    """Whether fallback is allowed for a request without the header `x-forebay-fallback`."""
    price_per_mtok: Annotated[float, Field(ge=0)] | None = None
    """Price of a million tokens, in the unit of the header `x-forebay-max-cost`."""
    rollout: RolloutSettings = RolloutSettings()
    """How new revisions are rolled out."""

    placement: PlacementSettings = PlacementSettings()
    """Where its replicas run."""

    def scaling(self) -> Scale | None:
        """How the model is scaled; None: a fixed number of replicas."""
        times = (self.slo.ttft_p99_ms, self.slo.tpot_p99_ms, self.slo.latency_p99_ms)
        ttft_s, tpot_s, latency_s = (None if time_ms is None else time_ms / 1000 for time_ms in times)
        return None if self.scale is None else self.scale.value(ttft_s, tpot_s, latency_s)


Band = Literal["system", "interactive", "default", "batch"]
Limit = Annotated[int, Field(ge=1, le=1_000_000_000_000)]


class QuotaSettings(Section):
    """Limits of a tenant across all gateway processes. Each limit must be at least `gateway.processes`."""

    requests_per_min: Limit | None = None
    """Requests in any 60 seconds; none: no limit."""
    tokens_per_min: Limit | None = None
    """Prompt and completion tokens in any 60 seconds. A request counts with its estimate until it ends."""
    streams_max: Limit | None = None
    """Concurrent open streams."""
    tokens_per_day: Limit | None = None
    """Tokens from midnight to midnight, UTC."""


class TenantSettings(Section):
    """A client of the cluster. `forebay keys create --tenant NAME` makes its API keys."""

    name: Name
    """Name of the tenant."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Models it may use: names, or patterns with `*`."""
    band: Band = "default"
    """Priority of its requests unless they state one."""
    band_max: Band | None = None
    """Highest priority that a request may ask for; none: `band`."""
    limits: QuotaSettings = QuotaSettings()
    """Limits of the tenant."""

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
    """Workers listen on the first free ports at or above this one."""
    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1)]
    """The models to serve."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Additional names that clients can use for models, or for names in `routes`."""
    routes: tuple[RouteSettings, ...] = ()
    """Rules that choose a model by properties of the request."""
    nodes: tuple[NodeSettings, ...] = ()
    """Machines, or parts of this one, that replicas run on; none: one node `local`, this machine."""
    limits: ClusterLimits = ClusterLimits()
    """Limits on the replicas of all models together; beyond them each model gets its `min` and a fair share."""
    health: HealthSettings = HealthSettings()
    """GPU health monitoring."""
    tenants: tuple[TenantSettings, ...] = ()
    """Clients and their limits, with `gateway.auth: keys`."""
    store: str | None = None
    """Database of the registry and the history: `sqlite:///PATH` or `postgresql://USER@HOST/NAME`; none: the file
    `forebay.db` below `FOREBAY_HOME`."""
    control: ControlSettings = ControlSettings()
    """The control plane."""
    registry: RegistrySettings = RegistrySettings()
    """The model registry."""

    @model_validator(mode="after")
    def _parts_fit(self) -> "Cluster":
        found = conflicts(self.model_dump(mode="json"))
        if found:
            raise ValueError("; ".join(f"{c.path}: {c.found}; allowed: {c.allowed}" for c in found))
        return self


RESERVED_NAMES = ("gateway",)
"""Unit names that models must not have: `gateway-0` is the first gateway process."""


def conflicts(raw: Mapping[str, Any]) -> tuple[Conflict, ...]:
    """All conflicts in a cluster given as unvalidated data. Parts of a wrong type are skipped: validation reports
    those."""
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
        *_host_conflicts(raw),
        *_auth_conflicts(gateway, raw.get("tenants", [])),
        *_proxy_conflicts(gateway.get("trusted_proxies")),
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
            found = f'"{name}", also the name of {key}[{first[name]}]'
            yield Conflict(f"{key}[{index}].name", found, f"a name that no other {key.removesuffix('s')} has")
        first.setdefault(name, index)


def _engine_conflicts(sections: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    known = [name for names in ENGINES_OF.values() for name in names]  # a list, as invalid names may not be hashable
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
    """A missing `engine` with `source: synthetic`: the synthetic engine needs no source."""
    for index, section in enumerate(sections):
        if section.get("source") == "synthetic" and section.get("engine") is None and section.get("task") != "tensor":
            allowed = "`engine: synthetic`, which needs no model; for a file of that name use `source: ./synthetic`"
            yield Conflict(f"models[{index}].engine", "nothing, with `source: synthetic`", allowed)


def _promise_conflicts(sections: Sequence[Mapping[str, Any]]) -> Iterator[Conflict]:
    for index, section in enumerate(sections):
        slo = section.get("slo")
        slo = slo if isinstance(slo, Mapping) else {}
        if slo.get("drop_late") is True and slo.get("ttft_p99_ms") is None:
            yield Conflict(
                f"models[{index}].slo.drop_late", "true", "false, or set `ttft_p99_ms`, which is the deadline"
            )
        if section.get("spares") == "auto" and not slo.get("availability"):
            allowed = "a number, or set `slo.availability`, which determines them"
            yield Conflict(f"models[{index}].spares", '"auto"', allowed)


def _port_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    gateway, admin = (_port(raw.get("gateway"), GatewaySettings), _port(raw.get("admin"), AdminSettings))
    if gateway == admin:
        yield Conflict("admin.port", f"{admin}, also the port of the gateway", "another port")


def _port(section: Any, settings: type[GatewaySettings] | type[AdminSettings]) -> Any:
    default = settings.model_fields["port"].default
    return section.get("port", default) if isinstance(section, Mapping) else default


def _host_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    nodes = ((f"nodes[{index}]", node) for index, node in enumerate(sections(raw.get("nodes"))))
    for path, section in (("gateway", raw.get("gateway")), ("admin", raw.get("admin")), *nodes):
        host = section.get("host") if isinstance(section, Mapping) else None
        if isinstance(host, str) and not is_host(host):
            yield Conflict(f"{path}.host", f'"{host[:80]}"', "an IP address or a host name, without a port")


def _auth_conflicts(gateway: Mapping[str, Any], tenants: Any) -> Iterator[Conflict]:
    auth = gateway.get("auth", GatewaySettings.model_fields["auth"].default)
    host = gateway.get("host", GatewaySettings.model_fields["host"].default)
    if auth == "keys" and tenants == []:
        yield Conflict("tenants", "nothing", "at least one tenant, as `gateway.auth: keys` requires their keys")
    if auth in ("off", "open") and tenants and isinstance(tenants, Sequence):
        yield Conflict("gateway.auth", f'"{auth}" with tenants', '"keys", without which their limits have no effect')
    if auth == "off" and isinstance(host, str) and is_host(host) and not is_loopback(host):
        allowed = (
            "127.0.0.1, as anyone may use a gateway with `auth: off`; for another address require keys with "
            "`gateway.auth: keys`, or write `gateway.auth: open` if anyone may use it"
        )
        yield Conflict("gateway.host", f'"{host}"', allowed)


def _proxy_conflicts(proxies: Any) -> Iterator[Conflict]:
    for index, network in enumerate(proxies if isinstance(proxies, list | tuple) else ()):
        try:
            if isinstance(network, str):
                ip_network(network, strict=False)
        except ValueError:
            allowed = "an address or a network, such as 10.0.0.0/8"
            yield Conflict(f"gateway.trusted_proxies[{index}]", f'"{network[:80]}"', allowed)


def _admin_conflicts(admin: Any) -> Iterator[Conflict]:
    host = admin.get("host") if isinstance(admin, Mapping) and admin.get("auth", "off") == "off" else None
    if isinstance(host, str) and is_host(host) and not is_loopback(host):
        allowed = "127.0.0.1, or any other one with `admin.auth: keys`: anyone who reaches it can change the cluster"
        yield Conflict("admin.host", f'"{host}"', allowed)


def is_loopback(host: str) -> bool:
    """Whether an address, or its name, is reachable from this machine only."""
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
                allowed = f"`*`, or a pattern that matches a model: {', '.join(names) or 'there is none'}"
                yield Conflict(f"tenants[{index}].models[{place}]", f'"{pattern}"', allowed)
        band, band_max = tenant.get("band", "default"), tenant.get("band_max")
        known = get_args(Band)
        if band in known and band_max in known and known.index(band) < known.index(band_max):
            allowed = f'"{band}", the `band` of the tenant, or a higher priority'
            yield Conflict(f"tenants[{index}].band_max", f'"{band_max}"', allowed)


def _limit_conflicts(tenants: Sequence[Mapping[str, Any]], processes: Any) -> Iterator[Conflict]:
    if not isinstance(processes, int):
        return
    for index, tenant in enumerate(tenants):
        limits = tenant.get("limits")
        for key in QuotaSettings.model_fields:
            limit = limits.get(key) if isinstance(limits, Mapping) else None
            if isinstance(limit, int) and 1 <= limit < processes:
                allowed = f"at least {processes}, so that each of the `gateway.processes` can grant at least one"
                yield Conflict(f"tenants[{index}].limits.{key}", str(limit), allowed)
