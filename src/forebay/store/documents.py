"""Documents that hold control's state, one per model or node of a cluster, stored together with their events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Table, insert, select, update

from forebay.store import events
from forebay.store.database import Conflict, Store
from forebay.store.lazy import LazyStore

NONE: Final = 0
"""The version of a document that is not stored yet."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored document, as JSON."""

    text: str = "{}"
    version: int = NONE


@dataclass(frozen=True, slots=True)
class Changed:
    """The event of a change: who did what to `subject` when, and why. `at`: seconds since the epoch."""

    kind: str
    at: float
    actor: str
    subject: str
    why: str
    document: Mapping[str, object] = field(default_factory=dict)


class Documents:
    """The documents of one cluster in one table, whose key is the cluster and a name.

    Every method raises `StoreError`. Thread-safe.
    """

    def __init__(
        self, table: Table, open_store: Callable[[], Store], cluster: str, exists: Callable[[], bool] = lambda: True
    ) -> None:
        self._table = table
        (self._name,) = (column for column in table.primary_key if column.name != "cluster")
        self._cluster = cluster
        self._lazy_store = LazyStore(open_store, exists)

    def close(self) -> None:
        """Close the store."""
        self._lazy_store.close()

    def known(self) -> dict[str, Kept]:
        """The documents by name; empty if there is no store yet."""
        if not self._lazy_store.exists:
            return {}
        row = self._table.c
        asked = select(self._name, row.document, row.version).where(row.cluster == self._cluster)
        with self._lazy_store.store().read() as connection:
            found = connection.execute(asked.order_by(self._name)).all()
        return {name: Kept(text, version) for name, text, version in found}

    def keep(self, name: str, kept: Kept, at: float, changed: Sequence[Changed] = ()) -> Kept:
        """Write a document with optimistic locking on its version (`NONE`: it must not exist), and its events.

        Returns the stored document. Raises `Conflict` if it was changed concurrently.
        """
        table, row = self._table, self._table.c
        values: dict[str, object] = {"document": kept.text, "version": kept.version + 1, "changed_at": at}
        if changed and "why" in row:
            values |= {"changed_by": changed[-1].actor, "why": changed[-1].why}
        same = (row.cluster == self._cluster) & (self._name == name) & (row.version == kept.version)
        with self._lazy_store.store().write() as connection:
            if kept.version == NONE:
                connection.execute(insert(table).values({"cluster": self._cluster, self._name.name: name, **values}))
            elif connection.execute(update(table).where(same).values(values)).rowcount != 1:
                raise Conflict(f"{table.name}: {name} was changed concurrently")
            for each in changed:
                events.append(
                    connection,
                    at=each.at,
                    actor=each.actor,
                    kind=each.kind,
                    subject=each.subject,
                    why=each.why,
                    document=each.document,
                    cluster=self._cluster,
                )
        return Kept(kept.text, kept.version + 1)
