"""What is known of nodes and their devices, and what people have asked of them: a document each, with its events."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import insert, select, update

from forebay.store import events
from forebay.store.database import Conflict, Store
from forebay.store.schema import NODES

NONE: Final = 0
"""Version of what is not stored yet."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A document as it is stored: JSON."""

    text: str = "{}"
    version: int = NONE


@dataclass(frozen=True, slots=True)
class Changed:
    """What has happened to a node or to one of its devices, `subject`: of the event that goes with it."""

    kind: str
    at: float
    actor: str
    subject: str
    why: str
    document: Mapping[str, object] = field(default_factory=dict)


class Nodes:
    """Those of one cluster in a store, which is opened when it is first needed.

    Every method raises `StoreError`. May be used from several threads at once.
    """

    def __init__(
        self, open_store: Callable[[], Store], cluster: str, there: Callable[[], bool] = lambda: True
    ) -> None:
        self._open = open_store
        self._cluster = cluster
        self._there = there
        self._opened: Store | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the store."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def known(self) -> dict[str, Kept]:
        """The documents by node; nothing if there is no store yet."""
        if self._opened is None and not self._there():
            return {}
        asked = select(NODES.c.name, NODES.c.document, NODES.c.version).where(NODES.c.cluster == self._cluster)
        with self._store().read() as connection:
            found = connection.execute(asked.order_by(NODES.c.name)).all()
        return {name: Kept(text, version) for name, text, version in found}

    def keep(self, node: str, kept: Kept, changed: Sequence[Changed]) -> Kept:
        """Write a document in the place of the one with its version (`NONE`: there is none), and what has happened.

        Returns it as it is stored. Raises `Conflict` if somebody else has written in between.
        """
        last = changed[-1]
        values = {
            "document": kept.text,
            "version": kept.version + 1,
            "changed_at": last.at,
            "changed_by": last.actor,
            "why": last.why,
        }
        same = (NODES.c.cluster == self._cluster) & (NODES.c.name == node) & (NODES.c.version == kept.version)
        with self._store().write() as connection:
            if kept.version == NONE:
                connection.execute(insert(NODES).values(cluster=self._cluster, name=node, **values))
            elif connection.execute(update(NODES).where(same).values(values)).rowcount != 1:
                raise Conflict(f"node {node} was changed by somebody else")
            for each in changed:
                events.append(
                    connection,
                    at=each.at,
                    actor=each.actor,
                    kind=each.kind,
                    subject=each.subject,
                    why=each.why,
                    document=each.document,
                )
        return Kept(kept.text, kept.version + 1)

    def _store(self) -> Store:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened
