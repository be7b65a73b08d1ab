"""What makes a control one of several: a lease in a store that it may lose, and the fence; and who watches."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from forebay.control.leading.candidate import Candidate
from forebay.control.leading.term import Term
from forebay.core.reconcile import Slot
from forebay.providers.fencing import Fence
from forebay.sim.full.book import Book
from forebay.sim.full.machine import Machine, MachineProvider
from forebay.sim.full.rollouts.store import ShakyStore
from forebay.store.database import Store, StoreDown
from forebay.store.leadership import Leadership

LEASE_S: Final = 2.0
ACT_S: Final = 0.01
"""It takes a moment from deciding to acting, in which a process may be stopped."""


def nothing() -> None:
    """There is nothing to do."""


class Reign:
    """Who leads by right: whoever has raised the fence last. `book` hears of it when somebody else does anything."""

    def __init__(self, book: Book) -> None:
        self.epoch = 0
        self._book = book

    def begins(self, epoch: int, who: str) -> None:
        """A control leads from now on."""
        self._book.note("leads", who, epoch)
        self._book.expect(epoch > self.epoch, "every term has an epoch of its own", f"{who}: {epoch}, {self.epoch}")
        self.epoch = max(epoch, self.epoch)

    def acts(self, epoch: int, what: str) -> None:
        """The control of an epoch has done something."""
        self._book.expect(epoch == self.epoch, "a deposed leader changes nothing", f"{what}: {epoch}, {self.epoch}")


class VirtualLeadership(Leadership):
    """A database has a clock of its own; here it tells virtual time."""

    def now(self, connection: Connection) -> float:
        """The time of the database, seconds."""
        return asyncio.get_running_loop().time()


class Seat:
    """The place of one control. `store` is the database as this control reaches it, `epochs` the fence's folder."""

    def __init__(self, store: Store, cluster: str, epochs: Path, reign: Reign) -> None:
        self.store = ShakyStore(store, lambda: None)
        self.reign = reign
        self.term: Term | None = None
        """Its last one."""
        self.before_act: Callable[[], None] = nothing
        """Called when it is about to place or remove a unit, and has decided that it may."""
        self._cluster = cluster
        self._epochs = epochs

    def candidate(self, who: str, note: Callable[[str, str], None]) -> Candidate:
        """A control that begins."""
        self.term = None
        leadership = VirtualLeadership(self._reach, self._cluster, who, who, LEASE_S)
        return Candidate(leadership, self._epochs, who, note)

    def begins(self, term: Term, who: str) -> None:
        """It leads."""
        self.term = term
        self.reign.begins(term.epoch, who)

    @property
    def leads(self) -> bool:
        """Whether it thinks so."""
        return self.term is not None and not self.term.over

    @property
    def sure(self) -> bool:
        """Whether it leads for as long as its lease runs: one that was stopped meanwhile only thinks so."""
        return self.term is not None and not self.term.why_not()

    @property
    def epoch(self) -> int:
        """Of its last term."""
        return 0 if self.term is None else self.term.epoch

    def guarded(self, term: Term) -> Store:
        """The store for what it writes as a leader."""
        return _Reached(term.guard(self.store), self._reach)

    def _reach(self) -> Store:
        if self.store.down:
            raise StoreDown(f"{self.store.name}: connection refused")
        return self.store


class _Reached(Store):
    """A store that has to be reached for every transaction."""

    def __init__(self, store: Store, reach: Callable[[], Store]) -> None:
        super().__init__(store._engine, store.name)
        self._store = store
        self._reach = reach

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self._reach()
        with self._store.write() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self._reach()
        with self._store.read() as connection:
            yield connection


class FencedProvider(MachineProvider):
    """The provider as a leader uses it, which looks at the fence before every act, as the local one does."""

    def __init__(self, machine: Machine, book: Book, fence: Fence, seat: Seat) -> None:
        super().__init__(machine, book)
        self._fence = fence
        self._seat = seat

    async def place(self, slot: Slot, generation: int) -> None:
        await self._act(f"place {slot.id}.{generation}")
        await super().place(slot, generation)

    async def remove(self, slot: str, generation: int, grace_s: float) -> None:
        await self._act(f"remove {slot}.{generation}")
        await super().remove(slot, generation, grace_s)

    async def _act(self, what: str) -> None:
        """Raises `Fenced`."""
        self._seat.before_act()
        await asyncio.sleep(ACT_S)
        self._fence.check()
        self._seat.reign.acts(self._fence.epoch, what)
