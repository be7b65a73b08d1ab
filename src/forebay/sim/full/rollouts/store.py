"""The product's store, with what may go wrong with one: it is gone, somebody else was first, an answer is lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, event
from sqlalchemy.engine.interfaces import DBAPIConnection

from forebay.store.database import Conflict, Store, StoreDown, open_store

NAME: Final = "the store"
"""What messages call it, in every run alike."""


def open_quick(url: str) -> Store:
    """The store at `sqlite:///PATH`, which does not wait for the disk: it ends with the simulation."""
    store = open_store(url)
    event.listen(store._engine, "connect", _hurry)
    store._engine.dispose()  # connections of before wait
    return store


def _hurry(connection: DBAPIConnection, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = OFF")
    cursor.close()


class ShakyStore(Store):
    """Like the store that it is made of, until one of its faults is set."""

    def __init__(self, store: Store, written: Callable[[], None]) -> None:
        super().__init__(store._engine, NAME)
        self.down = False
        """Nothing can be read or written."""
        self.conflicts = 0
        """So many of the next writes find that somebody else was first."""
        self.answers_lost = 0
        """So many of the next writes are kept, and who wrote is told that they may not be."""
        self._written = written

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction, as of any store; `written` is called after it, and may raise."""
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
        """A transaction that sees one state, as of any store."""
        self._reach()
        with super().read() as connection:
            yield connection

    def _reach(self) -> None:
        if self.down:
            raise StoreDown(f"{self.name}: connection refused")
