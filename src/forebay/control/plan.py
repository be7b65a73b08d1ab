"""The desired state from a cluster file, as slots and routes, once its models are prepared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from forebay.core.cluster import Cluster, GatewaySettings, ModelSettings, Slo
from forebay.core.deploy.settings import RolloutSettings
from forebay.core.dispatch.settings import make_dispatch, stand_ins
from forebay.core.model import (
    Dispatch,
    GatewaySpec,
    Limits,
    ModelRoutes,
    RecordsSpec,
    TenancySpec,
    TlsSpec,
    WorkerSpec,
)
from forebay.core.placement.settings import NodeSettings, PlacementSettings
from forebay.core.reconcile import Kind, ObservedUnit, Slot, State, needs_spare
from forebay.core.revision import revision_id, spec_digest
from forebay.core.scaling.settings import Scale
from forebay.core.scaling.sharing import Limits as ReplicaLimits
from forebay.core.tenancy import Tenant
from forebay.wire.http1 import authority
from forebay.wire.transcript import TEXT_BYTES_MAX

LOAD_MARGIN_S = 60.0
"""Extra time for a worker that does not detect itself that its engine cannot load."""


@dataclass(frozen=True)
class Artifact:
    """A model on this machine, ready to be loaded by its engine."""

    path: Path
    digest: str
    engine: str
    settings: Mapping[str, int | float | str | bool]


@dataclass(frozen=True)
class PlannedModel:
    """The desired state of a model. `routes` has no replicas yet."""

    routes: ModelRoutes
    engine: str
    source: str
    slo: Slo
    slots: tuple[Slot, ...]
    spare: Slot | None = None
    """An additional replica, wanted only while those of `slots` are replaced."""
    canary: tuple[Slot, ...] = ()
    """The slots of the revision that is being rolled out."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    scale: Scale | None = None
    """How its replica count follows the load; None: it is fixed."""
    standby: int = 0
    """How many more are kept ready without requests."""
    spares_auto: bool = False
    """Whether that is derived from `slo.availability`."""
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    cached: bool = False
    """Whether its files are kept in memory."""
    active: int | None = None
    """How many of `slots` serve, the other ready ones being on standby; None: all serve."""

    @property
    def units(self) -> tuple[Slot, ...]:
        """The replicas of all revisions."""
        return (*self.slots, *self.canary)


@dataclass(frozen=True)
class Plan:
    """The desired state that control works towards."""

    cluster: str
    gateway_url: str
    gateways: tuple[Slot, ...]
    models: tuple[PlannedModel, ...]
    auth: str = "off"
    """`gateway.auth`: whether requests need keys."""
    dispatch: Dispatch = field(default_factory=Dispatch)
    """Names besides those of the models."""
    tenants: tuple[Tenant, ...] | None = None
    """The tenants that keys belong to; None: requests need no keys."""
    version: str = ""
    """The version of Forebay: part of the digest of every slot."""
    nodes: tuple[NodeSettings, ...] = ()
    """The nodes for replicas; none: this machine."""
    limits: ReplicaLimits = field(default_factory=ReplicaLimits)
    """The limits that all models share."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Everything that is to run."""
        return (*self.gateways, *(slot for model in self.models for slot in model.units))

    def only(self, model: str | None) -> "Plan":
        """The plan with one model only; None: with all."""
        return replace(self, models=tuple(each for each in self.models if model in (None, each.routes.name)))

    def with_spares(self, state: State, units: Iterable[ObservedUnit]) -> "Plan":
        """The plan, with a spare added to every model whose replicas are being replaced.

        Not to models with replicas on standby: one of these steps in.
        """
        seen = tuple(units)
        models = tuple(
            replace(model, slots=(*model.slots, model.spare))
            if model.spare and model.active is None and needs_spare(model.slots, model.spare, state, seen)
            else model
            for model in self.models
        )
        return replace(self, models=models) if models != self.models else self


@dataclass(frozen=True)
class Places:
    """The paths of a cluster's run-time state."""

    folder: Path

    @property
    def snapshot(self) -> Path:
        """The snapshot that gateways route by."""
        return self.folder / "snapshot.json"

    @property
    def peers(self) -> Path:
        """Where gateway processes find each other, and control finds them."""
        return self.folder / "peers"

    @property
    def deployed(self) -> Path:
        """The deployed state, for a start while the store is down."""
        return self.folder / "deployed.json"

    @property
    def scaled(self) -> Path:
        """The scaling state, for the same purpose."""
        return self.folder / "scaled.json"

    @property
    def log(self) -> Path:
        """Control's event log."""
        return self.folder / "control.log"

    @property
    def records(self) -> Path:
        """The gateways' records of finished requests."""
        return self.folder / "records"

    @property
    def availability(self) -> Path:
        """The availability history of the models, by day."""
        return self.folder / "availability"

    @property
    def keys(self) -> Path:
        """API keys, unless the cluster file names another path."""
        return self.folder / "keys.json"

    @property
    def admin_keys(self) -> Path:
        """Keys of the admin API, unless the cluster file names another path."""
        return self.folder / "admin-keys.json"

    @property
    def counts(self) -> Path:
        """The tenants' usage as counted by each gateway."""
        return self.folder / "counts"

    @property
    def leases(self) -> Path:
        """How several gateways divide the tenants' limits."""
        return self.folder / "leases.json"

    @property
    def epochs(self) -> Path:
        """The fence: which of several controllers may act."""
        return self.folder / "epochs"

    @property
    def lock(self) -> Path:
        """Held by the one process that runs the cluster."""
        return self.folder / "lock"


def make_plan(cluster: Cluster, artifacts: Mapping[str, Artifact], places: Places, version: str) -> Plan:
    """The plan of a cluster; `artifacts` by model name. `version` of Forebay: another one replaces all units."""
    return Plan(
        cluster=cluster.name,
        gateway_url=_url(cluster.gateway),
        gateways=tuple(_gateway(cluster, index, places, version) for index in range(cluster.gateway.processes)),
        models=tuple(_model(cluster, model, artifacts[model.name], version) for model in cluster.models),
        auth=cluster.gateway.auth,
        dispatch=make_dispatch(cluster.aliases, cluster.routes),
        tenants=_tenants(cluster) if cluster.gateway.auth == "keys" else None,
        version=version,
        nodes=cluster.nodes,
        limits=cluster.limits.value(),
    )


def slot_of(base: Slot, index: int, artifact: Artifact | None, version: str) -> Slot:
    """A slot of the same model as `base`, with another index, and for another artifact; None: for the same one."""
    assert isinstance(base.spec, WorkerSpec)
    spec = replace(base.spec, replica=f"{base.spec.model}-{index}")
    if artifact is not None:
        spec = replace(
            spec,
            revision=revision_id(artifact.digest, artifact.engine, artifact.settings),
            engine=artifact.engine,
            artifact=str(artifact.path),
            settings=dict(artifact.settings),
        )
    return replace(base, id=spec.replica, index=index, digest=spec_digest(spec, version), spec=spec)


def _url(gateway: GatewaySettings) -> str:
    # asyncio's listeners on :: accept IPv6 only, so each family has its own loopback address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(gateway.host, gateway.host)  # noqa: S104 - not bound here
    return f"{'https' if gateway.tls else 'http'}://{authority(host, gateway.port)}"


def _tls(gateway: GatewaySettings) -> TlsSpec | None:
    if gateway.tls is None:
        return None
    return TlsSpec(str(Path(gateway.tls.certificate).absolute()), str(Path(gateway.tls.key).absolute()))


def keys_path(cluster: Cluster, places: Places) -> Path:
    """The path of a cluster's API keys."""
    return Path(cluster.gateway.keys_file).absolute() if cluster.gateway.keys_file else places.keys


def admin_keys_path(cluster: Cluster, places: Places) -> Path:
    """The path of a cluster's admin keys."""
    return Path(cluster.admin.keys_file).absolute() if cluster.admin.keys_file else places.admin_keys


def _tenants(cluster: Cluster) -> tuple[Tenant, ...]:
    return tuple(tenant.value() for tenant in cluster.tenants)


def _tenancy(cluster: Cluster, places: Places, gateway: str) -> TenancySpec | None:
    if cluster.gateway.auth != "keys":
        return None
    return TenancySpec(
        tenants=_tenants(cluster),
        keys_path=str(keys_path(cluster, places)),
        counts_path=str(places.counts / f"{gateway}.json"),
        leases_path=str(places.leases),
        gateways=cluster.gateway.processes,
    )


def _gateway(cluster: Cluster, index: int, places: Places, version: str) -> Slot:
    settings = cluster.gateway
    spec = GatewaySpec(
        id=f"gateway-{index}",
        generation=0,
        host=settings.host,
        port=settings.port,
        snapshot_path=str(places.snapshot),
        endpoint_path="",
        peers_dir=str(places.peers),
        limits=Limits(**settings.limits.model_dump()),
        replica_timeout_s=settings.replica_timeout_s,
        retries_max=settings.retries_max,
        drain_grace_s=settings.drain_grace_s,
        records=RecordsSpec(str(places.records), **settings.records.model_dump()),
        tenancy=_tenancy(cluster, places, f"gateway-{index}"),
        tls=_tls(settings),
        cors_origins=settings.cors_origins,
        metrics=settings.metrics,
        trusted_proxies=settings.trusted_proxies,
    )
    digest = spec_digest(spec, version)
    return Slot(spec.id, Kind.GATEWAY, "gateway", index, digest, spec, drain_grace_s=settings.drain_grace_s)


def _first(cluster: Cluster, model: ModelSettings, artifact: Artifact, version: str) -> Slot:
    spec = WorkerSpec(
        replica=f"{model.name}-0",
        generation=0,
        model=model.name,
        revision=revision_id(artifact.digest, artifact.engine, artifact.settings),
        task=model.task,
        engine=artifact.engine,
        artifact=str(artifact.path),
        endpoint_path="",
        port_first=cluster.worker_port_first,
        settings=dict(artifact.settings),
        engine_hang_s=model.engine_hang_s,
        drain_grace_s=model.drain_grace_s,
        lease_s=cluster.control.replica_lease_s,
        limits=Limits(
            # a request that resumes another replica's stream includes the text generated so far
            body_bytes_max=cluster.gateway.limits.body_bytes_max + TEXT_BYTES_MAX,
            bodies_bytes_max=cluster.gateway.limits.bodies_bytes_max,
        ),
    )
    return Slot(
        id=spec.replica,
        kind=Kind.REPLICA,
        group=model.name,
        index=0,
        digest=spec_digest(spec, version),
        spec=spec,
        load_timeout_s=spec.engine_load_timeout_s + LOAD_MARGIN_S,
        drain_grace_s=spec.drain_grace_s,
    )


def _model(cluster: Cluster, model: ModelSettings, artifact: Artifact, version: str) -> PlannedModel:
    first = _first(cluster, model, artifact, version)
    assert isinstance(first.spec, WorkerSpec)
    *slots, spare = (slot_of(first, index, None, version) for index in range(model.replicas + 1))
    return PlannedModel(
        _routes(model, first.spec.revision),
        artifact.engine,
        model.source,
        model.slo,
        tuple(slots),
        spare,
        rollout=model.rollout,
        scale=model.scaling(),
        standby=max(model.standby, model.spares if isinstance(model.spares, int) else 0),
        spares_auto=model.spares == "auto",
        cached=model.cached,
        placement=model.placement,
    )


def _routes(model: ModelSettings, revision: str) -> ModelRoutes:
    return ModelRoutes(
        name=model.name,
        task=model.task,
        policy=model.routing,
        sessions=model.sessions,
        hedge_after_s=model.hedge_after_s or 0.0,
        revision=revision,
        queue_max=model.queue_max,
        queue_timeout_s=model.queue_timeout_s,
        ttft_budget_s=model.slo.ttft_p99_ms / 1000 if model.slo.ttft_p99_ms else None,
        drops_late=model.slo.drop_late,
        fallback=stand_ins(model.fallback),
        fallback_default=model.fallback_default == "allow",
        price_per_mtok=model.price_per_mtok,
    )
