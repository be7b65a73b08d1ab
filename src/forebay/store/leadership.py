"""Leader election: one row per cluster with an epoch, and times by the clock of the database alone.

An expired lease is not lost until another controller takes it: its holder may renew it until then. Taking it always
yields a new epoch. A leader's writes are made in transactions that lock the row (`Guarded`): a controller that takes
the lease waits for them, and later writes of the old leader find another epoch and fail.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from sqlalchemy import Connection, Row, delete, func, insert, select, text, update

from forebay.store.database import Store, StoreError
from forebay.store.schema import CONTROLLERS, LEADERS

FORGOTTEN_LEASES: Final = 10.0
"""A waiting controller that has not been seen for so many lease durations is removed."""
NOW: Final = {
    "postgresql": "SELECT extract(epoch FROM clock_timestamp())",
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
}
"""Seconds since the epoch, by the database. Read once the row is locked: waiting for the lock may have taken long."""


class Deposed(StoreError):  # noqa: N818 - a state, not a mistake
    """This controller is not the leader any more: another one has taken the lease, or it was resigned."""


class Leader(NamedTuple):
    """The leader; an empty `holder`: there is none. `left_s`: the rest of its lease, negative if expired."""

    epoch: int
    holder: str
    url: str
    left_s: float


class Leadership:
    """The lease of a cluster, as used by one controller; `holder` identifies it uniquely, now and later.

    Every method blocks, and raises `StoreError`. With a slow store it gives up in time: see `_bounded`.
    """

    def __init__(self, store: Callable[[], Store], cluster: str, holder: str, url: str, lease_s: float) -> None:
        self._store = store
        self._cluster = cluster
        self._url = url
        self.holder = holder
        self.lease_s = lease_s

    def apply(self, floor: int = 0) -> Leader:
        """Take the lease if possible, with an epoch above `floor`; returns the leader. If another one leads, this one
        is recorded as waiting."""
        with self._write() as connection:
            row, now = self._held(connection)
            taken = row is not None and row.holder and now < row.renewed_at + row.lease_s
            # Our own unexpired lease gets a new epoch, too: we may have slept for any time since we got it.
            if row is not None and taken and row.holder != self.holder:
                self._wait(connection, now)
                return Leader(row.epoch, row.holder, row.url, row.renewed_at + row.lease_s - now)
            epoch = max(floor, 0 if row is None else row.epoch) + 1
            values = {
                "epoch": epoch,
                "holder": self.holder,
                "url": self._url,
                "renewed_at": now,
                "lease_s": self.lease_s,
            }
            if row is None:  # if two insert at once, one fails with a `Conflict` and retries
                connection.execute(insert(LEADERS).values(cluster=self._cluster, **values))
            else:
                connection.execute(update(LEADERS).where(LEADERS.c.cluster == self._cluster).values(values))
            self._leave(connection)
            return Leader(epoch, self.holder, self._url, self.lease_s)

    def renew(self, epoch: int) -> int:
        """Renew the lease; returns how many others are waiting now. Raises `Deposed`."""
        with self._write() as connection:
            row, now = self._held(connection)
            self._check(row, epoch)
            own = LEADERS.c.cluster == self._cluster
            connection.execute(update(LEADERS).where(own).values(renewed_at=now, lease_s=self.lease_s))
            waiting = CONTROLLERS.c.cluster == self._cluster
            forgotten = waiting & (CONTROLLERS.c.seen_at < now - FORGOTTEN_LEASES * self.lease_s)
            connection.execute(delete(CONTROLLERS).where(forgotten))
            lately = waiting & (CONTROLLERS.c.seen_at > now - self.lease_s / 2)
            return connection.execute(select(func.count()).select_from(CONTROLLERS).where(lately)).scalar_one()

    def resign(self) -> None:
        """Give the lease back, so that another controller can take it at once, and stop waiting."""
        with self._write() as connection:
            row, _ = self._held(connection)
            if row is not None and row.holder == self.holder:
                own = LEADERS.c.cluster == self._cluster
                connection.execute(update(LEADERS).where(own).values(holder="", url=""))
            self._leave(connection)

    def check(self, connection: Connection, epoch: int) -> None:
        """Lock the row until the transaction of the connection ends, if this controller leads. Raises `Deposed`."""
        own = LEADERS.c.cluster == self._cluster
        self._bounded(connection)
        self._check(connection.execute(select(LEADERS).where(own).with_for_update(read=True)).one_or_none(), epoch)

    def _check(self, row: "Row[tuple[object, ...]] | None", epoch: int) -> None:
        if row is None or row.epoch != epoch or row.holder != self.holder:
            who = "nobody" if row is None or not row.holder else f"{row.holder}, epoch {row.epoch}"
            raise Deposed(f"this controller (epoch {epoch}) is no longer the leader: {who} is")

    def _held(self, connection: Connection) -> "tuple[Row[tuple[object, ...]] | None, float]":
        own = LEADERS.c.cluster == self._cluster
        row = connection.execute(select(LEADERS).where(own).with_for_update()).one_or_none()
        return row, self.now(connection)

    def now(self, connection: Connection) -> float:
        """The time of the database, in seconds since the epoch."""
        return float(connection.execute(text(NOW[connection.dialect.name])).scalar_one())

    def _wait(self, connection: Connection, now: float) -> None:
        self._leave(connection)
        values = {"cluster": self._cluster, "holder": self.holder, "url": self._url, "seen_at": now}
        connection.execute(insert(CONTROLLERS).values(values))

    def _leave(self, connection: Connection) -> None:
        own = (CONTROLLERS.c.cluster == self._cluster) & (CONTROLLERS.c.holder == self.holder)
        connection.execute(delete(CONTROLLERS).where(own))

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self._store().write() as connection:
            self._bounded(connection)
            yield connection

    def _bounded(self, connection: Connection) -> None:
        """A controller that stops in the middle of a transaction holds the lock no longer than its lease."""
        if connection.dialect.name == "postgresql":
            for name in ("idle_in_transaction_session_timeout", "lock_timeout", "statement_timeout"):
                connection.execute(text(f"SET LOCAL {name} = {int(self.lease_s * 1000)}"))


class Guarded(Store):
    """A store for the writes of one leader's term: `write` raises `Deposed` once it is over."""

    def __init__(self, store: Store, leadership: Leadership, epoch: int) -> None:
        super().__init__(store._engine, store.name)
        self._leadership = leadership
        self._epoch = epoch

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction, committed if the block succeeds and the leader has not changed."""
        with super().write() as connection:
            self._leadership.check(connection, self._epoch)
            yield connection
