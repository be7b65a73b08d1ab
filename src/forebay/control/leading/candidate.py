"""A controller that waits to become the leader."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from forebay.control.leading.term import LeaderStatus, Term
from forebay.core.leading.lease import LOOKS
from forebay.providers.fencing import Fence, Fenced, highest_epoch
from forebay.store.access import RunBlocking
from forebay.store.database import Store, StoreError
from forebay.store.leadership import Leader, Leadership

CHANGED = "follows"
"""Kind of the event that names the leader."""


class Candidate:
    """A follower. `epochs`: the fence file of the run folder; `note` is status of new leaders and of problems."""

    def __init__(self, leadership: Leadership, epochs: Path, url: str, note: Callable[[str, str], None]) -> None:
        self._leadership = leadership
        self._epochs = epochs
        self._url = url
        self._note = note
        self._leader: Leader | None = None
        self._trouble = ""

    def why_not(self) -> str:
        leader = self._leader
        if leader is None:
            return self._trouble or "the leader is not known yet"
        return f"the controller at {leader.url} is the leader ({leader.holder}, epoch {leader.epoch})"

    @property
    def status(self) -> LeaderStatus | None:
        leader = self._leader
        return None if leader is None else LeaderStatus(leader.epoch, leader.holder, leader.url, here=False)

    def guard(self, store: Store) -> Store:
        return store

    async def elected(self, run: RunBlocking) -> Term:
        """Wait until this controller is the leader, and no controller of an older epoch can act any more."""
        now = asyncio.get_running_loop().time
        while True:
            term = await self.attempt(run, now)
            if term is not None:
                return term
            await asyncio.sleep(self._leadership.lease_s / LOOKS)

    async def attempt(self, run: RunBlocking, now: Callable[[], float]) -> Term | None:
        """Become the leader if possible; None: not yet. `now` is this controller's own clock."""
        asked_at = now()
        try:
            leader = await run(lambda: self._leadership.apply(highest_epoch(self._epochs)))
            if leader.holder == self._leadership.holder:
                fence = Fence(self._epochs, leader.epoch)
                fence.raise_up()
                self._leader = None  # the previous leader is not one any more, whoever deposes this one
                return Term(self._leadership, fence, asked_at, self._url, now=now)
        except (StoreError, Fenced, OSError) as error:
            self._note_trouble(str(error))
        else:
            self._note_leader(leader)
        return None

    async def resign(self, run: RunBlocking) -> None:
        """Stop waiting or leading; if the store is unavailable, the lease expires by itself."""
        try:
            await run(self._leadership.resign)
        except StoreError as error:
            self._note_trouble(str(error))

    def _note_leader(self, leader: Leader) -> None:
        known, self._leader, self._trouble = self._leader, leader, ""
        if known is None or (known.epoch, known.holder) != (leader.epoch, leader.holder):
            self._note(CHANGED, self.why_not())

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._note("store_trouble", trouble)
        self._trouble = trouble
