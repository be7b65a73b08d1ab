"""How control uses a store: blocking work runs elsewhere, and trouble is reported once, not in every round."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from forebay.store.database import Conflict, StoreError
from forebay.store.documents import Changed, Documents, Kept

T = TypeVar("T")
RETRY_S: Final = 2.0
"""How long to wait before using the store again after it failed."""


class RunBlocking(Protocol):
    """Runs blocking work: in a thread, or directly where nothing blocks."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """The result of `work`; its exceptions are raised."""


class StoreAccess:
    """Uses a store, and notes when that begins to fail. `meanwhile`: what happens without it, for that note."""

    def __init__(self, run: RunBlocking, note: Callable[[str, str], None], meanwhile: str) -> None:
        self._run = run
        self._note = note
        self._meanwhile = meanwhile
        self.trouble = ""
        """Why the store is unavailable; empty: it is available."""
        self._retry_at = 0.0

    def is_due(self) -> bool:
        """Whether the store may be used now: it has not failed within the last `RETRY_S`."""
        return asyncio.get_running_loop().time() >= self._retry_at

    async def __call__(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises `StoreError`; a `Conflict` is not trouble with the store."""
        try:
            found = await self._run(work)
        except Conflict:
            raise
        except StoreError as error:
            self._retry_at = asyncio.get_running_loop().time() + RETRY_S
            if not self.trouble:
                self._note("store_trouble", f"{error}; {self._meanwhile}")
            self.trouble = str(error)
            raise
        self.trouble = ""
        return found

    async def keep(
        self, records: Documents, name: str, kept: Kept, at: float, changed: Sequence[Changed]
    ) -> tuple[Kept, bool]:
        """Write a document with its events. Returns what is stored then, and whether it is this document."""
        try:
            return await self(lambda: records.keep(name, kept, at, changed)), True
        except Conflict:  # another writer, or our own write whose response was lost
            stored = (await self(records.known)).get(name, Kept())
            return stored, stored.text == kept.text
