"""Persistence of scaling. Writes are made by a separate task: a slow store never delays a round.

While the store is down scaling continues in memory, and is stored when the store is back.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from forebay.control.rolling.values import Run
from forebay.control.scaling.kept import Scaled
from forebay.obs.clock import wall_s
from forebay.store.database import Conflict, StoreError
from forebay.store.documents import NONE, Documents, Kept
from forebay.wire.documents import UNREADABLE

T = TypeVar("T")
KEEP_EVERY_S: Final = 60.0
"""How often learned state is stored while nothing changes."""
LOOK_EVERY_S: Final = 5.0
RETRY_S: Final = 2.0
"""How long to wait before using the store again after it failed."""


class Book:
    """Reads once, then writes. `recall`: a file with the same content, for a start while the store is down; None:
    none."""

    def __init__(
        self, records: Documents, run: Run, note: Callable[[str, str], None], recall: Path | None = None
    ) -> None:
        self._records = records
        self._recall = recall
        self._texts: dict[str, str] = {}
        """The content of the `recall` file."""
        self._run = run
        self._note = note
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self.read = False
        """Whether the stored state has been read."""
        self.trouble = ""
        """Why the store is unavailable; empty: it is available."""

    def close(self) -> None:
        """Close the store."""
        self._records.close()

    def hurry(self) -> None:
        """Store changes soon."""
        self._news.set()

    async def known(self) -> Mapping[str, Kept]:
        """The stored state. Raises `StoreError`."""
        found = await self._try(self._records.known)
        self.read = True
        return found

    def recalled(self) -> Mapping[str, Kept] | None:
        """The state when something was last stored; None: unknown."""
        if self._recall is None:
            return None
        try:
            self._texts = msgspec.json.decode(self._recall.read_bytes(), type=dict[str, str])
        except (OSError, *UNREADABLE):
            return None
        return {model: Kept(text) for model, text in self._texts.items()}

    def _remember(self, model: str, text: str) -> None:
        """Errors with the file only prevent a start without the store."""
        self._texts[model] = text
        if self._recall is None:
            return
        draft = self._recall.with_suffix(".new")
        try:
            draft.write_bytes(msgspec.json.encode(self._texts))
            draft.replace(self._recall)
        except OSError:
            draft.unlink(missing_ok=True)

    async def follow(
        self, models: Callable[[], Iterable[Scaled]], take: Callable[[Mapping[str, Kept]], None]
    ) -> None:
        """Store changes, until cancelled. `take` gets the stored state if it could not be read before."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._news.wait()
            self._news.clear()
            try:
                due = [each for each in models() if self._is_due(each)]
                if not self.read:
                    for each in due:
                        self._remember(each.model, each.text())
                    take(await self.known())
                for each in due:
                    await self.keep(each)
            except StoreError:
                await asyncio.sleep(RETRY_S)
            except Exception as mistake:  # supervisor: it is retried
                self._note("trouble", f"scaling: {type(mistake).__name__}: {mistake}")
                await asyncio.sleep(RETRY_S)

    async def keep(self, it: Scaled) -> None:
        """Store a model now. Raises `StoreError`; then it is retried later."""
        async with self._turn:
            new, changed = Kept(it.text(), it.version), tuple(it.changed)
            self._remember(it.model, new.text)
            try:
                stored = await self._try(lambda: self._records.keep(it.model, new, wall_s(), changed))
            except Conflict:  # another writer, or our own write whose response was lost
                kept = (await self._try(self._records.known)).get(it.model, Kept())
                it.version = kept.version
                if kept.text != new.text:
                    self._news.set()
                    return
                stored = kept
            it.version = stored.version
            it.forget(changed)
            it.kept_at = asyncio.get_running_loop().time()

    def _is_due(self, it: Scaled) -> bool:
        if it.changed:
            return True
        used = it.version != NONE or it.wanted is not None
        return used and asyncio.get_running_loop().time() - it.kept_at >= KEEP_EVERY_S

    async def _try(self, work: Callable[[], T]) -> T:
        try:
            found = await self._run(work)
        except Conflict:
            raise
        except StoreError as error:
            if not self.trouble:
                self._note("store_trouble", f"{error}; scaling goes on in memory")
            self.trouble = str(error)
            raise
        self.trouble = ""
        return found
