"""The time for which a control leads: it may act while its lease lasts by its own clock, and ends when it is deposed.

A lease that cannot be renewed only pauses it: with the store down nobody else can take it either, and when the store
is back the same control goes on, unless another one was quicker.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from forebay.control.rolling.nouns import Run
from forebay.core.leading.lease import RENEWALS, usable_until
from forebay.providers.fencing import Fence, Fenced
from forebay.store.database import Store, StoreError
from forebay.store.leadership import Deposed, Guarded, Leadership


@dataclass(frozen=True, slots=True)
class LeaderStatus:
    """Who leads. `here`: the control that was asked. `waiting`: how many others could take over."""

    epoch: int
    holder: str
    url: str
    here: bool
    waiting: int = 0


class Leading(Protocol):
    """What a control knows of who leads."""

    def why_not(self) -> str:
        """Why this one may not act just now; empty: it may."""

    @property
    def told(self) -> LeaderStatus | None:
        """Who leads; None: that is not known."""

    def guard(self, store: Store) -> Store:
        """The store for what this one writes as a leader."""


class Term:
    """A term of this control. `asked_at`: when it asked for what it got, by its own clock `now`, seconds."""

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
        """Why it leads no more; empty: it does."""
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
    def told(self) -> LeaderStatus | None:
        if self.over:
            return None
        return LeaderStatus(self.epoch, self._leadership.holder, self._url, here=True, waiting=self.waiting)

    def guard(self, store: Store) -> Store:
        return Guarded(store, self._leadership, self.epoch)

    async def keep(self, run: Run) -> None:
        """Renew the lease until this control is deposed, whatever happens to the store."""
        while not self.over:
            await asyncio.sleep(self._leadership.lease_s / RENEWALS)
            await self.renew(run)

    async def renew(self, run: Run) -> None:
        """Try to go on leading."""
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
