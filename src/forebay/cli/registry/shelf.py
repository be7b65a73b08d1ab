"""Resolves revisions for deployments: from the registry to prepared artifacts on this machine."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from forebay.cli.registry.opening import registry_of, store_of
from forebay.cli.settings import UserError
from forebay.control.deploying import DeployRefused
from forebay.control.plan import Artifact
from forebay.core.cluster import Cluster, ModelSettings
from forebay.registry.catalogue import Registry
from forebay.registry.proved import RegistryError, Unknown
from forebay.registry.sources import REGISTRY, Progress, SourceError, parse_registered
from forebay.store.database import Store, StoreError
from forebay.store.documents import Documents
from forebay.store.rollouts import Rollouts
from forebay.store.schema import NODES, SCALES

T = TypeVar("T")
SQLITE = "sqlite:///"
Preparing = Callable[[ModelSettings, Path, Progress, Callable[[], Registry]], Artifact]


async def in_thread(work: Callable[[], T]) -> T:
    """Run a blocking function in a thread."""
    return await asyncio.to_thread(work)


def rollouts_of(cluster: Cluster, home: Path, guard: Callable[[Store], Store] = lambda store: store) -> Rollouts:
    """The deployed revisions of a cluster. A missing store file is not created just for reading."""
    return Rollouts(lambda: guard(store_of(cluster, home)), cluster.name, partial(_there, cluster, home))


def scales_of(cluster: Cluster, home: Path, guard: Callable[[Store], Store] = lambda store: store) -> Documents:
    """The scaling state of its models; likewise without creating the store file."""
    return Documents(SCALES, lambda: guard(store_of(cluster, home)), cluster.name, partial(_there, cluster, home))


def nodes_of(cluster: Cluster, home: Path, guard: Callable[[Store], Store] = lambda store: store) -> Documents:
    """The state of its nodes; likewise without creating the store file."""
    return Documents(NODES, lambda: guard(store_of(cluster, home)), cluster.name, partial(_there, cluster, home))


def _there(cluster: Cluster, home: Path) -> bool:
    """Whether the store exists; assumed for one that is not a file."""
    if cluster.store is None:
        return (home.absolute() / "forebay.db").exists()
    path, _, _ = cluster.store.removeprefix(SQLITE).partition("?")
    return not cluster.store.startswith(SQLITE) or Path(path).exists()


class CatalogueShelf:
    """The registry of a cluster, by its current file. A model's revisions are registered under its own name, or under
    the one in its `source: registry:…`."""

    def __init__(self, cluster: Callable[[], Cluster], home: Path, prepare: Preparing, progress: Progress) -> None:
        self._cluster = cluster
        self._home = home
        self._prepare = prepare
        self._progress = progress

    def find(self, model: str, name: str) -> str:
        """The id of a revision that may be served. Blocks.

        Raises `DeployRefused`, which lists the revisions and how to register one, and `StoreError`.
        """
        settings = self._settings(model)
        try:
            with registry_of(self._cluster(), self._home) as registry:
                revision = registry().may_serve(_registered(settings), name).revision
        except Unknown as error:
            raise DeployRefused(f"{error}. {_how_to_register(settings)}", "revision") from error
        except (RegistryError, SourceError) as error:
            raise DeployRefused(str(error), "revision") from error
        if revision.task is not settings.task:
            text = f"{revision.name}: is registered for `task: {revision.task}`, and {model} has {settings.task}"
            raise DeployRefused(text, "revision")
        return revision.id

    async def prepare(self, model: str, revision: str) -> Artifact:
        """Fetch, verify and convert it. Raises `DeployRefused`; `StoreError` says nothing about the revision."""
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
    """The name under which a model's revisions are registered."""
    source = parse_registered(model.source)
    return source.model if source else model.name


def _how_to_register(model: ModelSettings) -> str:
    engine = f" --engine {model.engine.name}" if model.engine is not None else ""
    return f"`forebay registry add {_registered(model)} SOURCE --task {model.task}{engine}` registers one"
