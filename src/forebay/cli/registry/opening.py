"""Opens the store and the registry that a cluster file speaks of."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from forebay.core.cluster import Cluster
from forebay.registry.catalogue import Registry
from forebay.registry.signing import own_signer, read_public
from forebay.store.database import Store, open_store


def store_of(cluster: Cluster, home: Path) -> Store:
    """The store of a cluster. Raises `StoreError`."""
    return open_store(cluster.store or f"sqlite:///{home.absolute() / 'forebay.db'}")


@contextmanager
def registry_of(cluster: Cluster, home: Path) -> Iterator[Callable[[], Registry]]:
    """Opens the registry when it is first asked for. That raises `StoreError`, `SourceError`."""
    settings = cluster.registry
    with ExitStack() as open_now:

        @cache
        def registry() -> Registry:
            store = store_of(cluster, home)
            open_now.callback(store.close)
            folder = Path(settings.folder) if settings.folder else home / "registry"
            key = Path(settings.key_file) if settings.key_file else home / "registry.key"
            publishers = tuple(read_public(Path(path)) for path in settings.publishers)
            return Registry(store, folder.absolute(), own_signer(key.absolute()), settings.rules(), publishers)

        yield registry
