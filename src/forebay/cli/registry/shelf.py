"""Where deployments find revisions: in the registry, and then on this machine."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from forebay.cli.registry.opening import registry_of, store_of
from forebay.cli.settings import UserError
from forebay.control.deploying import DeployRefused
from forebay.control.plan import Artifact
from forebay.core.cluster import Cluster, ModelSettings
from forebay.registry.catalogue import Registry
from forebay.registry.proved import RegistryError
from forebay.registry.sources import REGISTRY, Progress, SourceError, parse_registered
from forebay.store.database import StoreError
from forebay.store.rollouts import Rollouts

T = TypeVar("T")
SQLITE = "sqlite:///"
Preparing = Callable[[ModelSettings, Path, Progress, Callable[[], Registry]], Artifact]


async def in_thread(work: Callable[[], T]) -> T:
    """For what blocks."""
    return await asyncio.to_thread(work)


def rollouts_of(cluster: Cluster, home: Path) -> Rollouts:
    """What is deployed in a cluster. A file that is not there yet is not made to find nothing in it."""
    path = home.absolute() / "forebay.db" if cluster.store is None else None
    if cluster.store and cluster.store.startswith(SQLITE):
        path = Path(cluster.store.removeprefix(SQLITE))
    return Rollouts(lambda: store_of(cluster, home), cluster.name, lambda: path is None or path.exists())


class CatalogueShelf:
    """The registry of a cluster, as its file is now. A model's revisions are registered under its own name, or under
    the one that its `source: registry:…` names."""

    def __init__(self, cluster: Callable[[], Cluster], home: Path, prepare: Preparing, progress: Progress) -> None:
        self._cluster = cluster
        self._home = home
        self._prepare = prepare
        self._progress = progress

    def find(self, model: str, name: str) -> str:
        """The id of a revision that may be served. Blocks. Raises `DeployRefused`, `StoreError`."""
        settings = self._settings(model)
        try:
            with registry_of(self._cluster(), self._home) as registry:
                revision = registry().may_serve(_registered(settings), name).revision
        except (RegistryError, SourceError) as error:
            raise DeployRefused(str(error), "revision") from error
        if revision.task is not settings.task:
            text = f"{revision.name}: is registered for `task: {revision.task}`, and {model} has {settings.task}"
            raise DeployRefused(text, "revision")
        return revision.id

    async def prepare(self, model: str, revision: str) -> Artifact:
        """Fetch, check and convert it. Raises `DeployRefused`; `StoreError` says nothing about the revision."""
        try:
            return await in_thread(lambda: self._prepared(model, revision))
        except UserError as error:
            if isinstance(error.__cause__, StoreError):
                raise error.__cause__ from error
            raise DeployRefused(str(error), "revision") from error

    def _prepared(self, model: str, revision: str) -> Artifact:
        settings = self._settings(model)
        source = f"{REGISTRY}{_registered(settings)}@{revision}"
        wanted = settings.model_copy(update={"source": source, "engine": None, "sha256": None})
        with registry_of(self._cluster(), self._home) as registry:
            return self._prepare(wanted, self._home, self._progress, registry)

    def _settings(self, model: str) -> ModelSettings:
        found = next((each for each in self._cluster().models if each.name == model), None)
        if found is None:
            raise DeployRefused(f"{model}: is no longer in the cluster file", "model")
        return found


def _registered(model: ModelSettings) -> str:
    """The name under which the revisions of a model are registered."""
    source = parse_registered(model.source)
    return source.model if source else model.name
