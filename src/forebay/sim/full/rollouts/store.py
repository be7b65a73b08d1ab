"""The product's store with faults: unavailable, write conflicts, lost responses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, event
from sqlalchemy.engine.interfaces import DBAPIConnection

from forebay.store.database import Conflict, Store, StoreDown, open_store

NAME: Final = "the store"
"""Its name in messages, the same in every run."""


def open_quick(url: str) -> Store:
    """The store at `sqlite:///PATH`, without syncing to disk, as it ends with the simulation."""
    store = open_store(url)
    event.listen(store._engine, "connect", _hurry)
    store._engine.dispose()  # existing connections still sync
    return store


def _hurry(connection: DBAPIConnection, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = OFF")
    cursor.close()


class ShakyStore(Store):
    """Behaves like the underlying store until one of its faults is set."""

    def __init__(self, store: Store, written: Callable[[], None]) -> None:
        super().__init__(store._engine, NAME)
        self.down = False
        """Nothing can be read or written."""
        self.conflicts = 0
        """Number of next writes that fail with a conflict."""
        self.answers_lost = 0
        """Number of next writes that succeed but are reported as possibly lost."""
        self._written = written

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A write transaction; `written` is called after it, and may raise."""
        self._reach()
        with super().write() as connection:
            yield connection
            if self.conflicts:
                self.conflicts -= 1
                raise Conflict(f"{self.name}: somebody else was first")
        self._written()
        if self.answers_lost:
            self.answers_lost -= 1
            raise StoreDown(f"{self.name}: the connection was lost during COMMIT")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction with a consistent view."""
        self._reach()
        with super().read() as connection:
            yield connection

    def _reach(self) -> None:
        if self.down:
            raise StoreDown(f"{self.name}: connection refused")
