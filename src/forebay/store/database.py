"""Opens the store, migrates its schema, and runs transactions on it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)

LOCK_TIMEOUT_S: Final = 10
"""Longest wait for a concurrent transaction."""
CONNECT_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 30
LOST_S: Final = 10
"""A server that acknowledges nothing for this long counts as lost."""
MIGRATION_LOCK: Final = 0x666F7265
"""Key of the advisory lock under which one process at a time migrates PostgreSQL's schema."""
FILE_MODE: Final = 0o600


class StoreError(Exception):
    """The store cannot be used; the text names it, without its password, and says what to do."""


class StoreDown(StoreError):  # noqa: N818 - a state, not a mistake
    """The store is unreachable, or failed temporarily: retrying later may help."""


class Conflict(StoreError):  # noqa: N818 - somebody else was first
    """The row exists already, or was changed concurrently."""


class Store:
    """A database with this version's schema. Thread-safe."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name
        """Its name in messages, without a password."""

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction, committed if the block succeeds; one at a time on SQLite. Raises `StoreError`."""
        with self._named_errors(), self._engine.connect() as connection:
            connection.info["writes"] = True
            with connection.begin():
                yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one snapshot of the store. Raises `StoreError`."""
        with self._named_errors(), self._engine.connect() as connection:
            connection.info["writes"] = False
            if connection.dialect.name == "postgresql":
                connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError as error:
            raise Conflict(f"{self.name}: {_reason(error)}") from error
        except (OperationalError, InterfaceError) as error:
            raise StoreDown(f"{self.name}: {_reason(error)}") from error
        except DBAPIError as error:
            kind = StoreDown if error.connection_invalidated else StoreError
            raise kind(f"{self.name}: {_reason(error)}") from error
        except SQLAlchemyError as error:
            raise StoreError(f"{self.name}: {error}") from error


def open_store(url: str) -> Store:
    """Open the store at `sqlite:///PATH` or `postgresql://…`; creates it if missing, migrates it if older.

    Several processes may do so at once. Raises `StoreError`, also if a newer version of Forebay has written it.
    """
    address = _address(url)
    name = address.render_as_string(hide_password=True).replace("+psycopg", "")
    engine = _open_sqlite(address, name) if address.get_backend_name() == "sqlite" else _reach_postgres(address)
    store = Store(engine, name)
    try:
        _migrate(store)
    except BaseException:
        store.close()
        raise
    return store


def _reach_postgres(address: URL) -> Engine:
    try:
        return create_engine(
            address,
            pool_pre_ping=True,
            pool_timeout=CONNECT_TIMEOUT_S,
            connect_args={
                "client_encoding": "utf8",  # whatever the database's is: with SQL_ASCII, texts would be bytes
                "connect_timeout": CONNECT_TIMEOUT_S,
                "tcp_user_timeout": LOST_S * 1000,
                "keepalives_idle": LOST_S // 2,
                "keepalives_interval": 1,
                "options": f"-c lock_timeout={LOCK_TIMEOUT_S}s -c statement_timeout={STATEMENT_TIMEOUT_S}s",
            },
        )
    except ImportError as error:
        raise StoreError(
            f"{error.name} is missing, which PostgreSQL needs: pip install 'forebay[postgres]'"
        ) from None


def _address(url: str) -> URL:
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):  # the latter for a port that is no number
        raise StoreError(f"{_hidden(url)}: not a URL; use sqlite:///PATH or postgresql://USER@HOST/NAME") from None
    match address.get_backend_name():
        case "sqlite":
            if address.host or not address.database or address.database == ":memory:":
                raise StoreError(f"{url}: names no file; use sqlite:///PATH, with four slashes for an absolute path")
            return address.set(drivername="sqlite")
        case "postgresql" | "postgres":
            return address.set(drivername="postgresql+psycopg")
        case other:
            raise StoreError(f"{other}: not a kind of store; use sqlite:///PATH or postgresql://USER@HOST/NAME")


def _hidden(url: str) -> str:
    return re.sub(r"//[^/]*@", "//***@", url)


def _open_sqlite(address: URL, name: str) -> Engine:
    path = Path(str(address.database))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(FILE_MODE)
    except OSError as error:
        raise StoreError(f"{name}: {path} cannot be written ({error.strerror})") from error
    engine = create_engine(address, connect_args={"timeout": LOCK_TIMEOUT_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, record: object) -> None:
        connection.isolation_level = None  # transactions begin explicitly, not before the first change
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        # A reader that becomes a writer midway may fail at once; one that announces it first waits for the lock.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.info.get("writes") else "BEGIN")

    return engine


def _migrate(store: Store) -> None:
    from forebay.store.migrations import HEAD, REVISIONS, upgrade

    with store.read() as connection:
        if _version(connection) == HEAD:
            return
    with store.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        version = _version(connection)
        if version is not None and version not in REVISIONS:
            raise StoreError(
                f"{store.name}: has the schema {version}, which this version of Forebay does not know: "
                "a newer one has written it. Use that one, or another store."
            )
        if version != HEAD:
            upgrade(connection)


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(select(text("version_num")).select_from(text("alembic_version"))).scalar()


def _reason(error: DBAPIError) -> str:
    """The first line of the database's error; parameters, which may hold anything, are omitted."""
    lines = str(error.orig).strip().splitlines()
    return lines[0] if lines else type(error.orig).__name__
