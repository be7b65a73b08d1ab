"""Control's view of the stored deployments: one change at a time, and nothing that has not been stored."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from forebay.control.rolling.events import CONTROL
from forebay.control.rolling.recalling import Recall
from forebay.store.access import RunBlocking
from forebay.store.database import StoreDown, StoreError
from forebay.store.rollouts import Known, RolloutEvent, Rollouts, Row, Target

T = TypeVar("T")
RETRY_S: Final = 1.0
"""How long to wait before using an unreachable store again."""


class Ledger:
    """Targets and rollouts. Hold `turn` while changing them; changes raise `StoreError`."""

    def __init__(
        self, records: Rollouts, run: RunBlocking, note: Callable[[str, str], None], recall: Recall | None = None
    ) -> None:
        self._records = records
        self._run = run
        self._note = note
        self._recall = recall
        self.targets: dict[str, Target] = {}
        self.rows: dict[str, Row] = {}
        """By model: the active rollout, else the last one."""
        self.turn = asyncio.Lock()
        self.doubtful = False
        """Whether the store may differ from what is known here."""
        self.trouble = ""
        """Why the store is unavailable; empty: it is available."""
        self._again_at = 0.0

    @property
    def under_way(self) -> list[Row]:
        """Active rollouts, sorted by model name."""
        return [row for _, row in sorted(self.rows.items()) if not row.ended]

    def free(self) -> bool:
        """Whether the store may be used now without waiting."""
        return not self.turn.locked() and asyncio.get_running_loop().time() >= self._again_at

    def close(self) -> None:
        """Close the store."""
        self._records.close()

    async def open(self) -> None:
        """Load the stored state for the first time, or if the store is down the recalled one."""
        try:
            await self.read()
        except StoreDown:
            known = self._recall.read() if self._recall is not None else None
            if known is None:
                raise
            self._take(known)

    async def read(self) -> None:
        """Load the stored state."""
        known = await self._try(self._records.known)
        self._take(known)
        self.doubtful = False
        self._remember()

    async def past(self, model: str | None, last: int) -> tuple[Row, ...]:
        """The last rollouts: active ones, then ended ones, newest first."""
        return await self._run(lambda: self._records.past(model, last))

    async def begin(self, row: Row, event: RolloutEvent) -> Row:
        """Store a new rollout, which gets its id."""
        kept = await self._try(lambda: self._records.begin(row, event))
        self.rows[row.rollout.model] = kept
        self._remember()
        why = f": {event.why}" if event.why else ""
        self._tell(event, f"{kept.rollout.id}: {kept.rollout.canary} is rolled out{why}")
        return kept

    async def change(
        self, row: Row, following: Row, events: tuple[RolloutEvent, ...], target: Target | None = None
    ) -> Row:
        """Store the successor of a row, and the resulting target."""
        stored = await self._try(lambda: self._records.change(following, events, target))
        # Samples counted while storing are newer than what was stored.
        kept = self.rows[row.rollout.model] = replace(stored, counted=self.rows[row.rollout.model].counted)
        if target is not None:
            self.targets[target.model] = target
        if events:
            self._remember()
        for event in events:
            if event.actor == CONTROL:
                text = kept.rollout.why
            else:
                text = event.kind.removeprefix("rollout.") + (f": {event.why}" if event.why else "")
            self._tell(event, f"{kept.rollout.id}: {text}")
        return kept

    async def point(self, target: Target, event: RolloutEvent) -> None:
        """Set the revision that a model serves from now on, without a rollout."""
        await self._try(lambda: self._records.point(target, event))
        self.targets[target.model] = target
        self._remember()
        self._tell(event, f"{target.model}: {target.revision}: {event.why}")

    async def _try(self, work: Callable[[], T]) -> T:
        """Use the store; if that fails, the state known here is doubtful."""
        try:
            found = await self._run(work)
        except StoreError as error:
            self.doubtful = True
            if isinstance(error, StoreDown):
                self._again_at = asyncio.get_running_loop().time() + RETRY_S
            if not self.trouble:
                self._note("store_trouble", str(error))
            self.trouble = str(error)
            raise
        self.trouble = ""
        return found

    def _take(self, known: Known) -> None:
        mine = self.rows
        self.targets = {target.model: target for target in known.targets}
        self.rows = {row.rollout.model: row for row in known.rollouts}
        for model, own in mine.items():
            row = self.rows.get(model)
            if row is not None and (own.rollout.id, own.version) == (row.rollout.id, row.version):
                self.rows[model] = own  # it has counted more samples

    def _remember(self) -> None:
        if self._recall is not None:
            targets = tuple(target for _, target in sorted(self.targets.items()))
            self._recall.keep(Known(targets, tuple(self.under_way)))

    def _tell(self, event: RolloutEvent, text: str) -> None:
        self._note(event.kind, text if event.actor == CONTROL else f"{text} (by {event.actor})")
