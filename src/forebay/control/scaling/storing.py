"""Persistence of scaling. Writes are made by a separate task: a slow store never delays a round.

While the store is down scaling continues in memory, and is stored when the store is back.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from forebay.control.scaling.state import ScalingState
from forebay.obs.clock import wall_s
from forebay.store.access import RETRY_S, RunBlocking, StoreAccess
from forebay.store.database import StoreError
from forebay.store.documents import NONE, Documents, Kept
from forebay.wire.documents import UNREADABLE

KEEP_EVERY_S: Final = 60.0
"""How often learned state is stored while nothing changes."""
LOOK_EVERY_S: Final = 5.0


class ScalingStore:
    """Reads once, then writes. `recall`: a file with the same content, for a start while the store is down; None:
    none."""

    def __init__(
        self, records: Documents, run: RunBlocking, note: Callable[[str, str], None], recall: Path | None = None
    ) -> None:
        self._records = records
        self._recall = recall
        self._texts: dict[str, str] = {}
        """The content of the `recall` file."""
        self._note = note
        self._use = StoreAccess(run, note, "scaling goes on in memory")
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self.read = False
        """Whether the stored state has been read."""

    @property
    def trouble(self) -> str:
        """Why the store is unavailable; empty: it is available."""
        return self._use.trouble

    def close(self) -> None:
        """Close the store."""
        self._records.close()

    def hurry(self) -> None:
        """Store changes soon."""
        self._news.set()

    async def known(self) -> Mapping[str, Kept]:
        """The stored state. Raises `StoreError`."""
        found = await self._use(self._records.known)
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
        self, models: Callable[[], Iterable[ScalingState]], take: Callable[[Mapping[str, Kept]], None]
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

    async def keep(self, state: ScalingState) -> None:
        """Store a model now. Raises `StoreError`; then it is retried later."""
        async with self._turn:
            new, changed = Kept(state.text(), state.version), tuple(state.changed)
            self._remember(state.model, new.text)
            stored, is_ours = await self._use.keep(self._records, state.model, new, wall_s(), changed)
            state.version = stored.version
            if not is_ours:
                self._news.set()
                return
            state.forget(changed)
            state.kept_at = asyncio.get_running_loop().time()

    def _is_due(self, state: ScalingState) -> bool:
        if state.changed:
            return True
        used = state.version != NONE or state.wanted is not None
        return used and asyncio.get_running_loop().time() - state.kept_at >= KEEP_EVERY_S
