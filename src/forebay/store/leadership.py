"""Which of several controls leads a cluster: one row with an epoch, and times by the clock of the database alone.

A lease that has ended is not lost before somebody else takes it: whoever had it may renew it until then. Who takes
it gets an epoch that nobody had before. What control writes is written in transactions that hold the row (`Guarded`):
who takes the lease waits for them, and what comes after finds another epoch there, and is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from sqlalchemy import Connection, Row, delete, func, insert, select, text, update

from forebay.store.database import Store, StoreError
from forebay.store.schema import CONTROLLERS, LEADERS

FORGOTTEN_LEASES: Final = 10.0
"""A control that waits, and has not said so for so many leases, is forgotten."""
NOW: Final = {
    "postgresql": "SELECT extract(epoch FROM clock_timestamp())",
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
}
"""Seconds since the epoch, by the database. Asked once the row is held: waiting for it may have taken long."""


class Deposed(StoreError):  # noqa: N818 - a state, not a mistake
    """This control leads no more: another one has taken the lease, or it was given back."""


class Leader(NamedTuple):
    """Who leads: nobody if `holder` is empty. `left_s`: the rest of its lease, below 0 if that has ended."""

    epoch: int
    holder: str
    url: str
    left_s: float


class Leadership:
    """The lease of a cluster, as one control uses it, which `holder` names among all, now and later.

    Every method blocks, and raises `StoreError`. A store that answers slowly makes it give up: see `_bounded`.
    """

    def __init__(self, store: Callable[[], Store], cluster: str, holder: str, url: str, lease_s: float) -> None:
        self._store = store
        self._cluster = cluster
        self._url = url
        self.holder = holder
        self.lease_s = lease_s

    def apply(self, floor: int = 0) -> Leader:
        """Take the lease if it can be had, with an epoch above `floor`; who leads then. If another one does, it is
        noted that this one waits."""
        with self._write() as connection:
            row, now = self._held(connection)
            taken = row is not None and row.holder and now < row.renewed_at + row.lease_s
            # One that has it already begins anew: who knows how long it slept since it was told.
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
            if row is None:  # of two at once one fails with a `Conflict`, and comes back
                connection.execute(insert(LEADERS).values(cluster=self._cluster, **values))
            else:
                connection.execute(update(LEADERS).where(LEADERS.c.cluster == self._cluster).values(values))
            self._leave(connection)
            return Leader(epoch, self.holder, self._url, self.lease_s)

    def renew(self, epoch: int) -> int:
        """Go on leading; how many others wait, and have said so just now. Raises `Deposed`."""
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
        """Lead no more, so that another one may at once, and wait no more."""
        with self._write() as connection:
            row, _ = self._held(connection)
            if row is not None and row.holder == self.holder:
                own = LEADERS.c.cluster == self._cluster
                connection.execute(update(LEADERS).where(own).values(holder="", url=""))
            self._leave(connection)

    def check(self, connection: Connection, epoch: int) -> None:
        """Hold the row until the transaction of the connection ends, if this one leads. Raises `Deposed`."""
        own = LEADERS.c.cluster == self._cluster
        self._bounded(connection)
        self._check(connection.execute(select(LEADERS).where(own).with_for_update(read=True)).one_or_none(), epoch)

    def _check(self, row: "Row[tuple[object, ...]] | None", epoch: int) -> None:
        if row is None or row.epoch != epoch or row.holder != self.holder:
            who = "nobody" if row is None or not row.holder else f"{row.holder}, epoch {row.epoch}"
            raise Deposed(f"this control (epoch {epoch}) leads no more: {who} does")

    def _held(self, connection: Connection) -> "tuple[Row[tuple[object, ...]] | None, float]":
        own = LEADERS.c.cluster == self._cluster
        row = connection.execute(select(LEADERS).where(own).with_for_update()).one_or_none()
        return row, self.now(connection)

    def now(self, connection: Connection) -> float:
        """The time of the database, seconds since the epoch."""
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
        """A control that stops in the middle of a transaction holds the row no longer than its lease."""
        if connection.dialect.name == "postgresql":
            for name in ("idle_in_transaction_session_timeout", "lock_timeout", "statement_timeout"):
                connection.execute(text(f"SET LOCAL {name} = {int(self.lease_s * 1000)}"))


class Guarded(Store):
    """A store that takes what one leadership writes, as long as it lasts: `write` raises `Deposed` after that."""

    def __init__(self, store: Store, leadership: Leadership, epoch: int) -> None:
        super().__init__(store._engine, store.name)
        self._leadership = leadership
        self._epoch = epoch

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is kept if the block ends well, and nobody else leads by then."""
        with super().write() as connection:
            self._leadership.check(connection, self._epoch)
            yield connection
