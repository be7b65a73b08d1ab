"""Where deployments find revisions: in the registry, and then on this machine."""

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
    """For what blocks."""
    return await asyncio.to_thread(work)


def rollouts_of(cluster: Cluster, home: Path, guard: Callable[[Store], Store] = lambda store: store) -> Rollouts:
    """What is deployed in a cluster. A file that is not there yet is not made to find nothing in it."""
    return Rollouts(lambda: guard(store_of(cluster, home)), cluster.name, partial(_there, cluster, home))


def scales_of(cluster: Cluster, home: Path, guard: Callable[[Store], Store] = lambda store: store) -> Documents:
    """What the scaling of its models remembers; of a file that is not there yet the same."""
    return Documents(SCALES, lambda: guard(store_of(cluster, home)), cluster.name, partial(_there, cluster, home))


def nodes_of(cluster: Cluster, home: Path, guard: Callable[[Store], Store] = lambda store: store) -> Documents:
    """What is known of its nodes; of a file that is not there yet the same."""
    return Documents(NODES, lambda: guard(store_of(cluster, home)), cluster.name, partial(_there, cluster, home))


def _there(cluster: Cluster, home: Path) -> bool:
    """Whether the store exists; assumed for one that is not a file."""
    if cluster.store is None:
        return (home.absolute() / "forebay.db").exists()
    return not cluster.store.startswith(SQLITE) or Path(cluster.store.removeprefix(SQLITE)).exists()


class CatalogueShelf:
    """The registry of a cluster, as its file is now. A model's revisions are registered under its own name, or under
    the one that its `source: registry:…` names."""

    def __init__(self, cluster: Callable[[], Cluster], home: Path, prepare: Preparing, progress: Progress) -> None:
        self._cluster = cluster
        self._home = home
        self._prepare = prepare
        self._progress = progress

    def find(self, model: str, name: str) -> str:
        """The id of a revision that may be served. Blocks.

        Raises `DeployRefused`, which says what there is and how to register what there is not, and `StoreError`.
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


def _how_to_register(model: ModelSettings) -> str:
    engine = f" --engine {model.engine.name}" if model.engine is not None else ""
    return f"`forebay registry add {_registered(model)} SOURCE --task {model.task}{engine}` registers one"
