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
from forebay.cli.registry.artifacts import MODEL_SERVER, prepare_model, prepare_models
from forebay.cli.registry.opening import store_of
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
from forebay.core.cluster import Cluster
from forebay.core.placement.settings import NodeSettings
from forebay.core.reconcile import Kind, Rules
from forebay.engines.sizing.estimate import estimate
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics
from forebay.providers.devices.opening import open_sources
from forebay.providers.fencing import highest_epoch
from forebay.providers.local import LocalProvider, clean_env
from forebay.providers.machine import this_machine
from forebay.registry.sources import Progress
from forebay.store.database import Store
from forebay.store.documents import Documents

COMMANDS = {
    Kind.REPLICA: (sys.executable, "-m", "forebay.worker"),
    Kind.GATEWAY: (sys.executable, "-m", "forebay.gateway"),
}
Guard = Callable[[Store], Store]
"""Wraps a store so that it rejects writes of a controller that is not the leader any more."""
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
