"""The composition root of `forebay up`: the only file that knows all components of a cluster."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forebay import __version__
from forebay.cli.records.reading import RecordFiles
from forebay.cli.registry.opening import registry_of, store_of
from forebay.cli.registry.served import catalogue_of
from forebay.cli.registry.shelf import CatalogueShelf, in_thread, nodes_of, rollouts_of, scales_of
from forebay.cli.reload import UNCHANGED, Reloader, record
from forebay.cli.settings import UserError
from forebay.cli.sla.delivered import delivered
from forebay.control.api.access import AccountAuthenticator, KeyAuthenticator
from forebay.control.api.app import make_app
from forebay.control.api.server import AdminServer
from forebay.control.api.services import Catalogue, Services
from forebay.control.deploying import Deployments
from forebay.control.health.health import Health
from forebay.control.journal import Journal, JournalEvent
from forebay.control.keyring import key_ring
from forebay.control.leading.term import Leading, Term
from forebay.control.leasing import make_leases
from forebay.control.loop import Controller
from forebay.control.placing.placer import Placer
from forebay.control.plan import Artifact, Places, Plan, admin_keys_path, make_plan
from forebay.control.probe import Prober
from forebay.control.quality.client import HttpModelClient
from forebay.control.quality.quality import Quality
from forebay.control.rolling.recalling import Recall
from forebay.control.scaling.scaler import Scaler
from forebay.control.snapshot import SnapshotFile
from forebay.control.standby.files import in_memory
from forebay.control.standby.history import AvailabilityHistory
from forebay.control.standby.standby import Standby
from forebay.core.cluster import Cluster, ModelSettings
from forebay.core.engine_settings import (
    ENGINES_OF,
    EngineSettings,
    LlamaCppSettings,
    ModelServerSettings,
    OnnxSettings,
    OpenVinoSettings,
    SyntheticSettings,
)
from forebay.core.model import Task
from forebay.core.placement.settings import NodeSettings
from forebay.core.reconcile import Kind, Rules
from forebay.engines import choose_engine
from forebay.engines.prepare import prepare
from forebay.engines.protocol import EngineBroken
from forebay.engines.sizing.estimate import estimate
from forebay.modelserver.replica.choosing import choose_model
from forebay.modelserver.repository import BadModel
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics
from forebay.providers.devices.opening import open_sources
from forebay.providers.fencing import highest_epoch
from forebay.providers.local import LocalProvider, clean_env
from forebay.providers.machine import this_machine
from forebay.registry.catalogue import Registry
from forebay.registry.digests import artifact_digest, verify
from forebay.registry.proved import RegistryError
from forebay.registry.sources import Progress, RegistrySource, SourceError, fetch, obtain, parse, parse_registered
from forebay.store.database import Store, StoreError
from forebay.store.documents import Documents

COMMANDS = {
    Kind.REPLICA: (sys.executable, "-m", "forebay.worker"),
    Kind.GATEWAY: (sys.executable, "-m", "forebay.gateway"),
}
Guard = Callable[[Store], Store]
"""Wraps a store so that it rejects writes of a controller that is not the leader any more."""
MODEL_SERVER = "modelserver"
ENGINE_COMMANDS = {MODEL_SERVER: (sys.executable, "-m", "forebay.modelserver")}
"""Commands of engines whose replicas are not `forebay.worker`."""


@dataclass(frozen=True)
class Parts:
    """A control plane, wired and not started."""

    plan: Plan
    control: Controller
    provider: LocalProvider
    prober: Prober
    journal: Journal
    reload: Reloader
    server: AdminServer
    deployments: Deployments
    client: HttpModelClient

    async def close(self) -> None:
        """Release all resources; units keep running."""
        self.provider.close()
        await self.client.close()
        self.deployments.close()
        if self.control.scaler is not None:
            self.control.scaler.close()
        if self.control.health is not None:
            self.control.health.close()
        self.journal.close()


def prepare_model(
    model: ModelSettings, home: Path, progress: Progress, registry: Callable[[], Registry] | None = None
) -> Artifact:
    """Fetch, verify and convert the files of a model; `registry` opens the registry if needed. Raises `UserError`."""
    try:
        registered = parse_registered(model.source)
        if registered and registry:
            return _prepare_registered(model, registered, registry(), home, progress)
    except (RegistryError, StoreError, SourceError, EngineBroken, BadModel, OSError) as error:
        raise UserError(f"model {model.name}: {error}") from error
    if isinstance(model.engine, SyntheticSettings):
        settings = {**model.engine.model_dump(), "task": model.task.value}
        return Artifact(Path("synthetic"), "synthetic", model.engine.name, settings)
    if model.task is Task.TENSOR:
        return _prepare_tensor_model(model, home, progress)
    try:
        path = fetch(parse(model.source), home, progress)
        if model.sha256:
            verify(path, model.sha256, home, progress)
        engine = model.engine or default_engine(path)
        if engine.name not in ENGINES_OF[model.task]:
            fitting = " or ".join(ENGINES_OF[model.task])
            raise UserError(
                f"model {model.name}: {path} is for {engine.name}, but `task: {model.task}` needs {fitting}"
            )
        settings = engine.model_dump()
        prepared = prepare(engine.name, path, settings, home / "cache", progress)
        digest = artifact_digest(path, home, progress)
    except (SourceError, EngineBroken, OSError) as error:
        raise UserError(f"model {model.name}: {error}") from error
    return Artifact(prepared.absolute(), digest, engine.name, settings)


def _prepare_tensor_model(model: ModelSettings, home: Path, progress: Progress) -> Artifact:
    """Fetch a repository, and check what can be checked without loading the model. Raises `UserError`."""
    engine = model.engine or ModelServerSettings()
    assert isinstance(engine, ModelServerSettings)  # validated by `core.cluster`
    try:
        path = obtain(parse(model.source), home, progress)
        if model.sha256:
            verify(path, model.sha256, home, progress)
        choose_model(path, model.name, engine.model)
        digest = artifact_digest(path, home, progress)
    except (SourceError, BadModel, OSError) as error:
        raise UserError(f"model {model.name}: {error}") from error
    return Artifact(path.absolute(), digest, MODEL_SERVER, engine.model_dump())


def _prepare_registered(
    model: ModelSettings, source: RegistrySource, registry: Registry, home: Path, progress: Progress
) -> Artifact:
    """A registered revision: engine settings in the cluster file must match its own."""
    listed, path = registry.open(source.model, source.revision, progress)
    revision = listed.revision
    settings = dict(revision.settings)
    if revision.task is not model.task:
        raise RegistryError(f"{revision.name}: is registered for `task: {revision.task}`, not for {model.task}")
    if model.engine and model.engine.model_dump() != settings:
        raise RegistryError(f"{revision.name}: has its own engine and settings; leave out `engine`")
    if model.task is Task.TENSOR:
        choose_model(path, model.name, str(settings.get("model", "")))
        return Artifact(path, revision.artifact, revision.engine, settings)
    prepared = prepare(revision.engine, path, settings, registry.cache(revision, home / "cache"), progress)
    return Artifact(prepared.absolute(), revision.artifact, revision.engine, settings)


def prepare_models(cluster: Cluster, home: Path, progress: Callable[[str], Progress]) -> dict[str, Artifact]:
    """The artifacts of all models, by name. Raises `UserError` with the problems of all of them."""
    artifacts, problems = {}, []
    with registry_of(cluster, home) as registry:
        for model in cluster.models:
            try:
                artifacts[model.name] = prepare_model(model, home, progress(model.name), registry)
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return artifacts


def default_engine(path: Path) -> EngineSettings:
    """The default settings of the engine that fits a file or folder. Raises `EngineBroken`."""
    match choose_engine(path):
        case "openvino":
            return OpenVinoSettings()
        case "llamacpp":
            return LlamaCppSettings()
        case "onnx":
            return OnnxSettings()
        case other:
            raise EngineBroken(f"{path}: engine {other!r} has no default settings; name one with `engine`")


def _plan_again(home: Path, places: Places, progress: Progress, changed: Cluster) -> Plan:
    """The plan of a changed cluster file. Raises `UserError`."""
    try:
        prepared = prepare_models(changed, home, lambda _: progress)
    except UserError as error:
        raise UserError(f"{error}\n{UNCHANGED}") from error
    return make_plan(changed, prepared, places, __version__)


def _health(
    cluster: Cluster,
    records: Documents,
    journal: Journal,
    metrics: Metrics,
    nodes: Callable[[], Sequence[NodeSettings]],
) -> Health:
    """Health checks of the nodes' devices."""
    settings = cluster.health
    return Health(
        records,
        in_thread,
        open_sources(settings),
        note=journal.note,
        metrics=metrics,
        rules=settings.rules(),
        poll_s=settings.poll_s,
        nodes=nodes,
    )


def build(
    cluster: Cluster,
    artifacts: Mapping[str, Artifact],
    places: Places,
    tell: Callable[[JournalEvent], None],
    *,
    home: Path,
    read: Callable[[], Cluster] | None = None,
    parse: Callable[[str], Cluster] | None = None,
    leading: Leading | None = None,
) -> Parts:
    """Wire a control plane that runs processes on this machine.

    `read` reads the cluster file again; None: there is none. `parse` parses one sent over the API; None: not allowed.
    `leading` decides who leads if there are several controllers.
    """
    plan = make_plan(cluster, artifacts, places, __version__)
    metrics = Metrics()
    metrics.gauge("build_info", __version__, "control").set(1)
    journal = Journal(places.log, tell)
    fence = leading.fence if isinstance(leading, Term) else None
    provider = LocalProvider(places.folder, COMMANDS, clean_env(os.environ), ENGINE_COMMANDS, fence)
    prober = Prober(places.peers)

    def unless_stopping(stage: str, done: int, total: int | None) -> None:
        if control.stopping:
            raise UserError("the cluster is stopping")

    guard: Guard = leading.guard if leading is not None else lambda store: store
    shelf = CatalogueShelf(lambda: reload.cluster, home, prepare_model, unless_stopping)
    client = HttpModelClient()
    quality = Quality(client, note=journal.note)
    rollouts, recall = rollouts_of(cluster, home, guard), Recall(places.deployed)
    deployments = Deployments(rollouts, shelf, in_thread, note=journal.note, quality=quality, recall=recall)
    scales = scales_of(cluster, home, guard)
    health = _health(cluster, nodes_of(cluster, home, guard), journal, metrics, lambda: reload.cluster.nodes)
    placer = Placer(this_machine(), estimate, lambda: health.excluded, lambda: health.readings, journal.note)
    health.unplaceable = placer.without
    control = Controller(
        plan,
        provider,
        prober,
        snapshot=SnapshotFile(places.snapshot, highest_epoch(places.epochs) if fence is None else fence.epoch),
        journal=journal,
        metrics=metrics,
        rules=Rules(),
        leases=make_leases(plan),
        deployments=deployments,
        scaler=Scaler(scales, in_thread, note=journal.note, metrics=metrics, recall=places.scaled),
        leading=leading,
        standby=Standby(
            metrics, journal.note, AvailabilityHistory(places.availability, journal, wall_s()), in_memory
        ),
        health=health,
        placer=placer,
    )

    plan_again = partial(_plan_again, home, places, unless_stopping)
    reload = Reloader(control, journal, cluster, plan, read, plan_again, parse)
    catalogue = catalogue_of(lambda: reload.cluster, home, unless_stopping)
    reload.record = partial(record, lambda: closing(guard(store_of(cluster, home))), cluster.name)
    server = AdminServer(make_app(_services(reload, catalogue, metrics, places)))
    return Parts(plan, control, provider, prober, journal, reload, server, deployments, client)


def _services(reload: Reloader, catalogue: Catalogue, metrics: Metrics, places: Places) -> Services:
    """The components behind the admin API. Authentication is fixed at the start: `admin.auth` needs a restart."""
    keys = reload.cluster.admin.auth == "keys"
    return Services(
        reload.control,
        reload.journal,
        metrics,
        reload,
        catalogue,
        KeyAuthenticator(admin_keys_path(reload.cluster, places)) if keys else AccountAuthenticator(),
        delivered=partial(delivered, places.records),
        keys=lambda: key_ring(reload.cluster, places),
        records=RecordFiles(places.records),
    )
