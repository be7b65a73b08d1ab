"""The values that cross process boundaries: replicas, snapshots, unit specifications, load reports."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from forebay.core.tenancy.keys import Tenant


class Task(StrEnum):
    """What a model does; decides which endpoints accept it."""

    CHAT = "chat"
    EMBED = "embed"
    TENSOR = "tensor"
    """Any tensors in and out: the Open Inference Protocol, and the endpoint of the model's task."""


class Policy(StrEnum):
    """How a gateway picks one of a model's ready replicas."""

    CPR = "cpr"
    PREFIX_AFFINITY = "prefix_affinity"
    LEAST_REQUESTS = "least_requests"
    P2C = "p2c"
    CONSISTENT_HASH = "consistent_hash"
    ROUND_ROBIN = "round_robin"


class Condition(StrEnum):
    """The condition of a model, as seen by one gateway."""

    FREE = "free"
    """A replica would take a request at once."""
    SATURATED = "saturated"
    DOWN = "down"
    """No replica takes requests."""


class ReplicaState(StrEnum):
    """State in a replica's life cycle; `core.lifecycle` has the table of transitions."""

    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Limits:
    """Bounds of one HTTP listener. Sizes in bytes, durations in seconds."""

    header_bytes_max: int = 32_768
    headers_max: int = 100
    body_bytes_max: int = 8 * 1024 * 1024
    bodies_bytes_max: int = 2 * 1024**3
    """Total of all large bodies being read at once."""
    connections_max: int = 10_000
    pipelined_max: int = 16
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    stream_buffer_bytes_max: int = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BlockNews:
    """Changes of a replica's prefix cache since the one asked for, in hashes of `core.prefix.blocks`."""

    seq: int
    """Number of the last change, to be passed with the next request."""
    reset: bool
    """`stored` is the whole content of the cache; earlier news is void."""
    estimated: bool
    """The engine does not report its cache: the worker infers the content from requests."""
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's report of its own load, as JSON at `/load`."""

    replica: str
    generation: int
    model: str
    revision: str
    state: ReplicaState
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    capacity: int = 0
    """How many requests run at once; more than this wait inside the worker."""
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0
    batch_fill: float = 0.0
    """Share of the largest batch that the last step used, 0..1."""
    stalled_s: float = 0.0
    """How long the engine has been unresponsive."""
    engine_restarts: int = 0
    engine_pid: int = 0
    """The first one, if there are several processes."""
    grpc_port: int = 0
    """Port on which the replica also serves gRPC; 0: none."""
    process: str = ""
    """Identity of the reporting process; empty: not reported. It differs after a restart, even with the same
    generation: a control that has lost its state counts generations from 1 again."""
    blocks: BlockNews | None = None
    """Only in answer to `?blocks_since=SEQ` (0: everything), and only if the prefix cache's content is known."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as gateways see it. `id` is the slot (`chat-0`); `generation` increases with every start."""

    id: str
    generation: int
    revision: str
    host: str
    port: int
    state: ReplicaState
    weight: float = 1.0
    """Relative throughput, above 0; less than 1 on a throttled GPU."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """A fallback model, used `when` the original one is in one of these conditions."""

    model: str
    when: tuple[Condition, ...] = (Condition.SATURATED, Condition.DOWN)


@dataclass(frozen=True, slots=True)
class When:
    """Conditions of a rule; all must hold. A default value imposes none."""

    task: Task | None = None
    prompt_tokens_min: int = 0
    prompt_tokens_max: int | None = None
    tenant: str = ""
    header: str = ""
    """Lower-case name of a required header."""
    header_value: str | None = None
    header_prefix: str = ""
    budget_ms_below: float | None = None
    budget_ms_above: float | None = None
    within_max_cost: bool = False
    """The rule's model must cost no more than the caller allows."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests for `name` that match `when` go to the model `then`, to replicas of `revision` if it is set."""

    name: str
    then: str
    revision: str = ""
    when: When = When()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Names besides those of models. `aliases` are fully resolved; the first matching rule applies."""

    aliases: dict[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()


class Sessions(StrEnum):
    """Which requests stick to one replica while it is healthy: none, those with a session header, or also a
    cookie."""

    OFF = "off"
    HEADER = "header"
    COOKIE = "cookie"


class Sticky(StrEnum):
    """What is assigned to one of two revisions: each request separately, or all requests of a caller."""

    REQUEST = "request"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class Split:
    """How a model's requests are divided between two revisions while one of them is rolled out."""

    rollout: str
    stable: str
    """The revision serving so far."""
    canary: str
    """The revision being rolled out. It gets only its share, and requests that name it."""
    share: float = 0.0
    """The canary's share of requests, or of callers, 0..1."""
    mirrored: float = 0.0
    """Share of requests mirrored to the canary, whose answers are discarded, 0..1."""
    sticky: Sticky = Sticky.REQUEST
    counts_from: float = 0.0
    """Requests that began before this are warm-up and not evaluated; seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ModelRoutes:
    """A model and its replicas, sorted by id."""

    name: str
    task: Task
    policy: Policy
    revision: str
    queue_max: int
    queue_timeout_s: float
    replicas: tuple[Replica, ...] = ()
    ttft_budget_s: float | None = None
    """TTFT objective; the reason of a route says if it will be missed."""
    drops_late: bool = False
    """Whether a request that waits longer than that is refused."""
    fallback: tuple[StandIn, ...] = ()
    fallback_default: bool = True
    """Whether fallback is allowed for a request that does not say."""
    price_per_mtok: float | None = None
    """Price of a million tokens, in the unit of callers' budgets."""
    sessions: Sessions = Sessions.OFF
    hedge_after_s: float = 0.0
    """Send short requests without side effects to a second replica after this time without an answer; 0: never."""
    split: Split | None = None
    """None: all replicas are of one revision."""
    on_demand: bool = False
    """It may scale to zero: requests then wait until a replica has started."""
    start_s: float = 0.0
    """How long a replica takes to start, seconds; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a gateway may route on. Written by control, kept on disk, always replaced as a whole."""

    version: int
    models: tuple[ModelRoutes, ...] = ()
    dispatch: Dispatch = field(default_factory=Dispatch)
    epoch: int = 0
    """Epoch of the leader that wrote it. Snapshots of older epochs are ignored once a newer one is known."""
    tenants: tuple[Tenant, ...] | None = None
    """The tenants from now on; None: those that the gateway was started with."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker process is told when it starts (a JSON file, `python -m forebay.worker FILE`)."""

    replica: str
    generation: int
    model: str
    revision: str
    task: Task
    engine: str
    artifact: str
    """Path of the prepared model: a file or a directory."""
    endpoint_path: str
    """Where the worker writes `Endpoint` once it listens."""
    host: str = "127.0.0.1"
    port_first: int = 8100
    """The worker listens on the first free port at or above this one."""
    settings: dict[str, int | float | str | bool] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    queue_max: int = 0
    """Most requests in flight; 0: 256, or four times as many as the engine runs at once if that is more."""
    engine_hang_s: float = 20.0
    engine_load_timeout_s: float = 300.0
    drain_grace_s: float = 30.0
    lease_s: float = 0.0
    """It stops itself if its load was not polled for this long; 0: never."""
    node: str = ""
    """The node it runs on; empty: not stated."""
    devices: tuple[str, ...] = ()
    """GPUs of that node, or MIG slices, that are visible to it."""
    cpus: tuple[int, ...] = ()
    """Cores it may run on; none: all."""


@dataclass(frozen=True)
class RecordsSpec:
    """What a gateway records about finished requests, and where. The usage ledger is always kept."""

    folder: str
    """Each gateway process of the cluster has its own folder in it."""
    decisions: bool = True
    audit: bool = True
    prompts: bool = False
    """Whether the audit log contains request bodies."""
    file_bytes_max: int = 64 * 1024 * 1024
    decision_files_max: int = 4
    audit_files_max: int = 0
    """0: keep all."""


@dataclass(frozen=True)
class TenancySpec:
    """Tenants of a gateway, and their limits."""

    tenants: tuple[Tenant, ...]
    """Those at its start; snapshots have later ones."""
    keys_path: str
    counts_path: str
    """Where this gateway process saves its counts for its next start."""
    leases_path: str
    """Where it reads its share of the limits, with several gateways: gateway id to `core.tenancy.Lease`."""
    gateways: int = 1
    """How many gateway processes share the limits."""


@dataclass(frozen=True)
class TlsSpec:
    """PEM files of a gateway's certificate (followed by its chain) and private key."""

    certificate: str
    key: str


@dataclass(frozen=True)
class GatewaySpec:
    """Everything a gateway process is told when it starts (a JSON file, `python -m forebay.gateway FILE`)."""

    id: str
    generation: int
    host: str
    port: int
    snapshot_path: str
    endpoint_path: str
    peers_dir: str
    """Folder in which every gateway process of the cluster writes `<id>.json` (the `Endpoint` of its private
    port)."""
    limits: Limits = field(default_factory=Limits)
    load_poll_s: float = 0.25
    replica_timeout_s: float = 3.0
    """A replica that answers no load poll for this long is considered lost: its waiting requests go elsewhere."""
    retries_max: int = 3
    response_buffer_bytes_max: int = 1024 * 1024
    drain_grace_s: float = 30.0
    records: RecordsSpec | None = None
    """None: nothing is recorded."""
    tenancy: TenancySpec | None = None
    """None: no keys are required."""
    tls: TlsSpec | None = None
    """None: plain HTTP."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use it (CORS), or `*` for all; none: no CORS headers are sent."""
    metrics: Literal["keys", "local", "open"] = "keys"
    """Who may read the public `/metrics`, and the names in `/readyz`: see `GatewaySettings.metrics`."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks of proxies whose `x-forwarded-for` is believed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a unit listens; written atomically by the unit itself once it does."""

    pid: int
    host: str
    port: int
