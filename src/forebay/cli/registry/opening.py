"""Opens the store and the registry of a cluster file."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from forebay.core.cluster import Cluster
from forebay.core.registry.settings import RegistrySettings
from forebay.registry.catalogue import Registry, staging
from forebay.registry.sealing import KeyCommand, KeyFile, Wrapper
from forebay.registry.signing import own_signer, read_public
from forebay.registry.uploads.staging import Staging
from forebay.registry.vault import Vault
from forebay.store.database import Store, open_store


def store_of(cluster: Cluster, home: Path) -> Store:
    """The store of a cluster. Raises `StoreError`."""
    return open_store(cluster.store or f"sqlite:///{home.absolute() / 'forebay.db'}")


def memory_of(cluster: Cluster) -> Path:
    """Where encrypted artifacts are decrypted to."""
    above = cluster.registry.memory_folder or f"/dev/shm/forebay-{os.getuid()}"  # noqa: S108 - it is 0700
    return Path(above).absolute() / cluster.name


def forget(cluster: Cluster) -> None:
    """Remove a cluster's decrypted artifacts."""
    shutil.rmtree(memory_of(cluster), ignore_errors=True)


def _wrapper(settings: RegistrySettings) -> Wrapper | None:
    encryption = settings.encryption
    if encryption is None:
        return None
    return KeyFile(Path(encryption.key_file)) if encryption.key_file else KeyCommand(encryption.command)


def staging_of(cluster: Cluster, home: Path) -> Staging:
    """Where uploads are kept until they are registered."""
    settings, folder = cluster.registry, _folder(cluster, home)
    return staging(folder, Vault(folder, None, memory_of(cluster)), encrypts=settings.encryption is not None)


def _folder(cluster: Cluster, home: Path) -> Path:
    folder = cluster.registry.folder
    return (Path(folder) if folder else home / "registry").absolute()


@contextmanager
def registry_of(cluster: Cluster, home: Path) -> Iterator[Callable[[], Registry]]:
    """Opens the registry on first use, which raises `StoreError`, `SourceError`."""
    settings = cluster.registry
    with ExitStack() as open_now:

        @cache
        def registry() -> Registry:
            store = store_of(cluster, home)
            open_now.callback(store.close)
            folder = _folder(cluster, home)
            key = Path(settings.key_file) if settings.key_file else home / "registry.key"
            publishers = tuple(read_public(Path(path)) for path in settings.publishers)
            return Registry(
                store,
                folder,
                own_signer(key.absolute()),
                settings.rules(),
                publishers=publishers,
                vault=Vault(folder, _wrapper(settings), memory_of(cluster)),
                encrypts=settings.encryption is not None,
            )

        yield registry
