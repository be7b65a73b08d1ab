"""The leadership of one of several controls: its lease in a store that may fail, its fence, and the checks."""

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
from forebay.sim.full.event_log import EventLog
from forebay.sim.full.machine import Machine, MachineProvider
from forebay.sim.full.rollouts.store import ShakyStore
from forebay.store.database import Store, StoreDown
from forebay.store.leadership import Leadership

LEASE_S: Final = 2.0
ACT_S: Final = 0.01
"""Delay between deciding and acting, in which a process may be stopped."""


def nothing() -> None:
    """No effect."""


class LeaderCheck:
    """The rightful leader: the last one that raised the fence. `event_log` records actions of any other."""

    def __init__(self, event_log: EventLog) -> None:
        self.epoch = 0
        self._event_log = event_log

    def begin_term(self, epoch: int, who: str) -> None:
        """A control becomes the leader."""
        self._event_log.note("leads", who, epoch)
        self._event_log.expect(epoch > self.epoch, "the epochs of terms increase", f"{who}: {epoch}, {self.epoch}")
        self.epoch = max(epoch, self.epoch)

    def check_action(self, epoch: int, what: str) -> None:
        """The control of an epoch has acted."""
        self._event_log.expect(
            epoch == self.epoch, "a deposed leader changes nothing", f"{what}: {epoch}, {self.epoch}"
        )


class VirtualLeadership(Leadership):
    """Leadership whose database clock is virtual time."""

    def now(self, connection: Connection) -> float:
        """The time of the database, seconds."""
        return asyncio.get_running_loop().time()


class ControllerLeadership:
    """The leadership state of one control. `store` is its access to the database, `epochs` the fence's folder."""

    def __init__(self, store: Store, cluster: str, epochs: Path, leader_check: LeaderCheck) -> None:
        self.store = ShakyStore(store, lambda: None)
        self.leader_check = leader_check
        self.term: Term | None = None
        """Its last term."""
        self.before_act: Callable[[], None] = nothing
        """Called when it is about to place or remove a unit, after it has checked that it may."""
        self._cluster = cluster
        self._epochs = epochs

    def candidate(self, who: str, note: Callable[[str, str], None]) -> Candidate:
        """The candidate of a starting control."""
        self.term = None
        own = VirtualLeadership(self._reach, self._cluster, who, who, LEASE_S)
        return Candidate(own, self._epochs, who, note)

    def begin_term(self, term: Term, who: str) -> None:
        """It becomes the leader."""
        self.term = term
        self.leader_check.begin_term(term.epoch, who)

    @property
    def leads(self) -> bool:
        """Whether it believes that it leads."""
        return self.term is not None and not self.term.over

    @property
    def has_valid_lease(self) -> bool:
        """Whether its lease is still valid: one that was stopped meanwhile only believes that it leads."""
        return self.term is not None and not self.term.why_not()

    @property
    def epoch(self) -> int:
        """The epoch of its last term."""
        return 0 if self.term is None else self.term.epoch

    def guarded(self, term: Term) -> Store:
        """The store for its writes as leader."""
        return _Reached(term.guard(self.store), self._reach)

    def _reach(self) -> Store:
        if self.store.down:
            raise StoreDown(f"{self.store.name}: connection refused")
        return self.store


class _Reached(Store):
    """A store that checks reachability for every transaction."""

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
    """The leader's provider, which checks the fence before every action, as the local one does."""

    def __init__(self, machine: Machine, event_log: EventLog, fence: Fence, leadership: ControllerLeadership) -> None:
        super().__init__(machine, event_log)
        self._fence = fence
        self._leadership = leadership

    async def place(self, slot: Slot, generation: int) -> None:
        await self._act(f"place {slot.id}.{generation}")
        await super().place(slot, generation)

    async def remove(self, slot: str, generation: int, grace_s: float) -> None:
        await self._act(f"remove {slot}.{generation}")
        await super().remove(slot, generation, grace_s)

    async def _act(self, what: str) -> None:
        """Raises `Fenced`."""
        self._leadership.before_act()
        await asyncio.sleep(ACT_S)
        self._fence.check()
        self._leadership.leader_check.check_action(self._fence.epoch, what)
