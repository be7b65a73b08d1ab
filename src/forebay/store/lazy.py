"""A store that is opened on first use."""

import threading
from collections.abc import Callable

from forebay.store.database import Store


class LazyStore:
    """Opens a store once. `exists`: whether it exists yet, so that reading does not create it.

    Thread-safe.
    """

    def __init__(self, open_store: Callable[[], Store], exists: Callable[[], bool] = lambda: True) -> None:
        self._open = open_store
        self._exists = exists
        self._opened: Store | None = None
        self._lock = threading.Lock()

    @property
    def exists(self) -> bool:
        """Whether anything can have been written."""
        return self._opened is not None or self._exists()

    def store(self) -> Store:
        """The store. Raises `StoreError`."""
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def close(self) -> None:
        """Close it; the next use opens it again."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None
