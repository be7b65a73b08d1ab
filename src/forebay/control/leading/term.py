"""A term of leadership: the controller may act while its lease lasts by its own clock; the term ends when deposed.

If the lease cannot be renewed, the controller only pauses: with the store down no other one can take the lease
either, and when the store is back the same one goes on, unless another was quicker.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from forebay.core.leading.lease import RENEWALS, usable_until
from forebay.providers.fencing import Fence, Fenced
from forebay.store.access import RunBlocking
from forebay.store.database import Store, StoreError
from forebay.store.leadership import Deposed, Guarded, Leadership


@dataclass(frozen=True, slots=True)
class LeaderStatus:
    """The leader. `here`: it is the controller that was asked. `waiting`: how many others could take over."""

    epoch: int
    holder: str
    url: str
    here: bool
    waiting: int = 0


class Leading(Protocol):
    """A controller's view of the leadership."""

    def why_not(self) -> str:
        """Why this controller may not act now; empty: it may."""

    @property
    def status(self) -> LeaderStatus | None:
        """The leader; None: unknown."""

    def guard(self, store: Store) -> Store:
        """The store for what this controller writes as the leader."""


class Term:
    """A term of this controller. `asked_at`: when it requested the lease, by its own clock `now`, in seconds."""

    def __init__(
        self,
        leadership: Leadership,
        fence: Fence,
        asked_at: float,
        url: str,
        *,
        now: Callable[[], float],
    ) -> None:
        self.fence = fence
        self.epoch = fence.epoch
        self.waiting = 0
        """How many others wait."""
        self.over = ""
        """Why the term is over; empty: it is not."""
        self._leadership = leadership
        self._url = url
        self._now = now
        self._until = usable_until(asked_at, leadership.lease_s)
        self._trouble = ""

    def why_not(self) -> str:
        if self.over:
            return self.over
        if self._now() < self._until:
            return ""
        return f"the lease could not be renewed, so nothing is changed: {self._trouble or 'the store is slow'}"

    @property
    def status(self) -> LeaderStatus | None:
        if self.over:
            return None
        return LeaderStatus(self.epoch, self._leadership.holder, self._url, here=True, waiting=self.waiting)

    def guard(self, store: Store) -> Store:
        return Guarded(store, self._leadership, self.epoch)

    async def keep(self, run: RunBlocking) -> None:
        """Renew the lease until deposed, whatever happens to the store."""
        while not self.over:
            await asyncio.sleep(self._leadership.lease_s / RENEWALS)
            await self.renew(run)

    async def renew(self, run: RunBlocking) -> None:
        """Try to renew the lease."""
        asked_at = self._now()
        try:
            self.fence.check()
            self.waiting = await run(lambda: self._leadership.renew(self.epoch))
        except (Deposed, Fenced) as error:
            self.over = str(error)
        except (StoreError, OSError) as error:
            self._trouble = str(error)
        else:
            self._until, self._trouble = usable_until(asked_at, self._leadership.lease_s), ""
