"""What the scaling of models remembers, and what people have set of it: a document each, kept with its event."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import insert, select, update

from forebay.store import events
from forebay.store.database import Conflict, Store
from forebay.store.schema import SCALES

NONE: Final = 0
"""Version of what is not stored yet."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A document as it is stored: JSON."""

    text: str = "{}"
    version: int = NONE


@dataclass(frozen=True, slots=True)
class Changed:
    """Who changed how many replicas are wanted, when and why: of an event. `at`: seconds since the epoch."""

    kind: str
    at: float
    actor: str
    why: str
    document: Mapping[str, object] = field(default_factory=dict)


class Scales:
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
        """The documents by model; nothing if there is no store yet."""
        if self._opened is None and not self._there():
            return {}
        asked = select(SCALES.c.model, SCALES.c.document, SCALES.c.version).where(SCALES.c.cluster == self._cluster)
        with self._store().read() as connection:
            found = connection.execute(asked.order_by(SCALES.c.model)).all()
        return {model: Kept(text, version) for model, text, version in found}

    def keep(self, model: str, text: str, version: int, at: float, changed: tuple[Changed, ...] = ()) -> int:
        """Write a document in the place of the one with that version (`NONE`: there is none), and what has changed.

        Returns its version. Raises `Conflict` if somebody else has written in between.
        """
        values = {"document": text, "version": version + 1, "changed_at": at}
        same = (SCALES.c.cluster == self._cluster) & (SCALES.c.model == model) & (SCALES.c.version == version)
        with self._store().write() as connection:
            if version == NONE:
                connection.execute(insert(SCALES).values(cluster=self._cluster, model=model, **values))
            elif connection.execute(update(SCALES).where(same).values(values)).rowcount != 1:
                raise Conflict(f"the scaling of {model} was changed by somebody else")
            for each in changed:
                events.append(
                    connection,
                    at=each.at,
                    actor=each.actor,
                    kind=each.kind,
                    subject=f"model/{model}",
                    why=each.why,
                    document=each.document,
                )
        return version + 1

    def _store(self) -> Store:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened
