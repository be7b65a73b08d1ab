"""The nouns that cross process borders: replicas, snapshots, unit specifications, load reports."""

from dataclasses import dataclass, field
from enum import StrEnum

from forebay.core.tenancy.keys import Tenant


class Task(StrEnum):
    """What a model does; decides which endpoints accept it."""

    CHAT = "chat"
    EMBED = "embed"
    TENSOR = "tensor"
    """Whatever tensors the model takes and gives: the Open Inference Protocol, and the endpoints of its task."""


class Policy(StrEnum):
    """How a gateway picks one of a model's ready replicas."""

    CPR = "cpr"
    PREFIX_AFFINITY = "prefix_affinity"
    LEAST_REQUESTS = "least_requests"
    P2C = "p2c"
    CONSISTENT_HASH = "consistent_hash"
    ROUND_ROBIN = "round_robin"


class Condition(StrEnum):
    """How a model is just now, to one gateway."""

    FREE = "free"
    """A replica would take a request at once."""
    SATURATED = "saturated"
    DOWN = "down"
    """No replica takes requests."""


class ReplicaState(StrEnum):
    """Where a replica is in its life; `core.lifecycle` holds the table of moves."""

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
    """Of all large bodies that are being read at the same time."""
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
    """Number of the last change; to be asked for next time."""
    reset: bool
    """`stored` is all that the cache holds; what was believed before is void."""
    estimated: bool
    """The engine does not say what it holds: the worker infers it from what it was sent."""
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker says of itself at `/load`; `core.model.LoadReport` is the JSON document."""

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
    """How long the engine has owed an answer without giving a sign of life."""
    engine_restarts: int = 0
    engine_pid: int = 0
    """Of several processes the first."""
    grpc_port: int = 0
    """Where the replica answers gRPC too; 0: nowhere."""
    process: str = ""
    """Which process says so; empty: it does not tell. Another start has another one, also where it has the same
    generation: a control that begins anew counts from 1 again for what it finds no trace of."""
    blocks: BlockNews | None = None
    """Only for who asks with `?blocks_since=SEQ` (0: all of it), and where something is known of the prefix cache."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as gateways see it. `id` is the slot (`chat-0`); `generation` grows with every start."""

    id: str
    generation: int
    revision: str
    host: str
    port: int
    state: ReplicaState
    weight: float = 1.0
    """How much of the usual work it can do, above 0: less than 1 on a GPU that is throttled."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """A model that may serve what another one cannot, `when` that one is in such a condition."""

    model: str
    when: tuple[Condition, ...] = (Condition.SATURATED, Condition.DOWN)


@dataclass(frozen=True, slots=True)
class When:
    """What a request has to be like for a rule to fit: all of this. A default asks for nothing."""

    task: Task | None = None
    prompt_tokens_min: int = 0
    prompt_tokens_max: int | None = None
    tenant: str = ""
    header: str = ""
    """Lower-case name of a header that has to be there."""
    header_value: str | None = None
    header_prefix: str = ""
    budget_ms_below: float | None = None
    budget_ms_above: float | None = None
    within_max_cost: bool = False
    """The model of the rule costs no more than the caller says."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests for `name` that fit `when` go to the model `then`, to replicas of `revision` if it has one."""

    name: str
    then: str
    revision: str = ""
    when: When = When()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Names beside those of the models. `aliases` lead to what they stand for at once; of rules the first counts."""

    aliases: dict[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()


class Sessions(StrEnum):
    """Which requests stay at one replica while it is healthy: none, those with a session header, or a cookie too."""

    OFF = "off"
    HEADER = "header"
    COOKIE = "cookie"


class Sticky(StrEnum):
    """What stays with one of two revisions: each request by itself, or all requests of a caller."""

    REQUEST = "request"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class Split:
    """How a model's requests are divided between two revisions while one of them is rolled out."""

    rollout: str
    stable: str
    """The revision that has served so far."""
    canary: str
    """The revision that is to serve. It gets nothing but its share, and requests that ask for it by name."""
    share: float = 0.0
    """Of the requests, or of the callers, 0..1."""
    mirrored: float = 0.0
    """Of the requests: so many are copied to the canary, whose answers nobody gets, 0..1."""
    sticky: Sticky = Sticky.REQUEST
    counts_from: float = 0.0
    """What began before, seconds since the epoch, is warm-up and tells nothing."""


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
    """Promised time to the first token; the reason of a route says where it will not be kept."""
    drops_late: bool = False
    """Whether a request that waits for longer than that is refused."""
    fallback: tuple[StandIn, ...] = ()
    fallback_default: bool = True
    """Whether a request that says nothing of it may be served by those."""
    price_per_mtok: float | None = None
    """Price of a million tokens, in the unit that callers give budgets in."""
    sessions: Sessions = Sessions.OFF
    hedge_after_s: float = 0.0
    """After so long without an answer, short requests without side effects go to a second replica; 0: never."""
    split: Split | None = None
    """None: all replicas are alike."""
    on_demand: bool = False
    """It may be without replicas while nobody asks: requests wait until one has started."""
    start_s: float = 0.0
    """How long a replica takes to come up, seconds; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a gateway may route on. Written by control, kept on disk, only ever replaced as a whole."""

    version: int
    models: tuple[ModelRoutes, ...] = ()
    dispatch: Dispatch = field(default_factory=Dispatch)
    epoch: int = 0
    """Which leadership of control has written it. One of an older epoch counts for nothing once a newer is known."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker process is told at its start (a JSON file, `python -m forebay.worker FILE`)."""

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
    """The first port tried; the first free one at or above it is taken."""
    settings: dict[str, int | float | str | bool] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    queue_max: int = 256
    engine_hang_s: float = 20.0
    engine_load_timeout_s: float = 300.0
    drain_grace_s: float = 30.0
    lease_s: float = 0.0
    """If nobody has asked for its load for so long, it stops itself; 0: never."""
    node: str = ""
    """Where it is to run; empty: nobody has said."""
    devices: tuple[str, ...] = ()
    """GPUs of that node, or slices of them, which are all that it sees."""
    cpus: tuple[int, ...] = ()
    """Cores that it may run on; none: all of them."""


@dataclass(frozen=True)
class RecordsSpec:
    """What a gateway writes down of finished requests, and where. The usage ledger is always kept."""

    folder: str
    """Each gateway process of the cluster has a folder of its own in it."""
    decisions: bool = True
    audit: bool = True
    prompts: bool = False
    """Whether the audit log holds the bodies of requests."""
    file_bytes_max: int = 64 * 1024 * 1024
    decision_files_max: int = 4
    audit_files_max: int = 0
    """0: all are kept."""


@dataclass(frozen=True)
class TenancySpec:
    """Who may use a gateway, and how much."""

    tenants: tuple[Tenant, ...]
    keys_path: str
    counts_path: str
    """Where this gateway process keeps what it has counted, for its next start."""
    leases_path: str
    """Where it finds its share of the limits, if there are several: gateway id to `core.tenancy.Lease`."""
    gateways: int = 1
    """How many gateway processes share the limits."""


@dataclass(frozen=True)
class TlsSpec:
    """The files of what a gateway proves itself by: PEM, the server's certificate first, then its chain."""

    certificate: str
    key: str


@dataclass(frozen=True)
class GatewaySpec:
    """Everything a gateway process is told at its start (a JSON file, `python -m forebay.gateway FILE`)."""

    id: str
    generation: int
    host: str
    port: int
    snapshot_path: str
    endpoint_path: str
    peers_dir: str
    """Folder in which every gateway process of the cluster writes `<id>.json` (an `Endpoint` of its own port)."""
    limits: Limits = field(default_factory=Limits)
    load_poll_s: float = 0.25
    replica_timeout_s: float = 3.0
    """A replica that answers no load poll for this long is lost: its waiting requests go elsewhere."""
    retries_max: int = 3
    response_buffer_bytes_max: int = 1024 * 1024
    drain_grace_s: float = 30.0
    records: RecordsSpec | None = None
    """None: nothing is written down."""
    tenancy: TenancySpec | None = None
    """None: everybody may use everything."""
    tls: TlsSpec | None = None
    """None: plain HTTP."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use it, `*`: of all; none: no page may, and no answer says anything of it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a unit listens; written by the unit itself, atomically, once it does."""

    pid: int
    host: str
    port: int
