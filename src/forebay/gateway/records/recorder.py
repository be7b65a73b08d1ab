"""The single entry point for records of finished requests: decisions, audit log and ledger.

Serving never fails because of records: file errors are logged and retried at the next `flush`, and losses are
counted.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from forebay.core.model import RecordsSpec
from forebay.gateway.records.audit import AuditLog
from forebay.gateway.records.facts import Facts
from forebay.gateway.records.ledger import Ledger
from forebay.gateway.records.writer import HELD_BYTES_MAX, Opener, OwnFolder, RecordLog, open_append

CHECKPOINT_S: Final = 5.0
"""How often the ledger is saved."""
DECISION_BYTES: Final = 2048
"""Assumed size of a buffered decision; most are smaller."""


class _Pending:
    """Requests that end while a thread has the records. Those beyond the bound are counted in the ledger only."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.waiting: list[Facts] = []
        self.missed = 0
        self._bytes = 0

    def add(self, facts: Facts) -> None:
        self.ledger.count(facts.ts, facts.tenant, facts.model, facts.code, facts.spent)
        if self._bytes >= HELD_BYTES_MAX:
            self.missed += 1
            return
        self._bytes += DECISION_BYTES + len(facts.line) + len(facts.prompt)
        self.waiting.append(facts)


class Recorder:
    """The records of one gateway process. `gateway` is its id; each process with the same id has its own folder."""

    def __init__(
        self,
        spec: RecordsSpec,
        gateway: str,
        log: structlog.stdlib.BoundLogger,
        open_file: Opener = open_append,
    ) -> None:
        self.prompts = spec.audit and spec.prompts
        """Whether `Facts.prompt` is to be set."""
        self._root = Path(spec.folder)
        self._gateway = gateway
        self._log = log
        self._decisions = (
            RecordLog(spec.file_bytes_max, spec.decision_files_max, open_file) if spec.decisions else None
        )
        self._audit = (
            AuditLog(spec.file_bytes_max, spec.audit_files_max, spec.prompts, open_file) if spec.audit else None
        )
        self._ledger = Ledger()
        self._own: OwnFolder | None = None
        logs = [part.start for part in (self._decisions, self._audit) if part is not None]
        self._to_start: list[Callable[[Path], None]] = [*logs, self._ledger.start]
        self._checkpoint_at = 0.0
        self._trouble: dict[str, str] = {}
        self._lost_logged = 0
        self._pending: _Pending | None = None

    @property
    def lost(self) -> int:
        """Records that are in no file: decisions, and requests without an audit line."""
        return (self._decisions.dropped if self._decisions else 0) + (self._audit.lost if self._audit else 0)

    @property
    def failing(self) -> int:
        """How many kinds of records cannot be written now."""
        return len(self._trouble)

    def start(self) -> bool:
        """Acquire the folder and continue where the last process stopped; call this before the first request is
        served.

        False if that is not possible yet: every `flush` retries it, and the audit log will say how many requests came
        until then.
        """
        try:
            if self._own is None:
                self._own = OwnFolder(self._root, self._gateway)
            while self._to_start:
                self._to_start[0](self._own.path)
                del self._to_start[0]
        except OSError as error:
            self._tell("folder", error)
            return False
        self._tell("folder", None)
        return True

    def finished(self, facts: Facts) -> None:
        """Record a finished request."""
        if self._pending is not None:
            self._pending.add(facts)
            return
        self._note(facts)
        self._ledger.count(facts.ts, facts.tenant, facts.model, facts.code, facts.spent)

    async def flush_aside(self, now: float) -> None:
        """`flush` on another thread: a disk that stalls, for a second or so, then delays no request.

        The records belong to that thread until it is done, even if this task is cancelled. Requests that end
        meanwhile are recorded afterwards.
        """
        self._pending = _Pending()
        flushed = asyncio.get_running_loop().run_in_executor(None, self.flush, now)
        cancelled: asyncio.CancelledError | None = None
        while not flushed.done():
            try:
                await asyncio.wait((flushed,))
            except asyncio.CancelledError as error:  # the thread goes on; compiled code must not await in here
                cancelled = error
        late, self._pending = self._pending, None
        self._ledger.take(late.ledger)
        for facts in late.waiting:
            self._note(facts)
        if late.missed:
            self._miss(late.missed)
        if cancelled is not None:
            raise cancelled
        flushed.result()

    def flush(self, now: float) -> None:
        """Write the buffered records. `now`: seconds of a monotonic clock."""
        if not self._ready():
            return
        self._write()
        if now < self._checkpoint_at:
            return
        self._checkpoint_at = now + CHECKPOINT_S
        if self._ledger.dirty and not (self._audit is not None and self._audit.behind):
            self._checkpoint()  # lines still to be written will be counted from the audit log
        if self.lost > self._lost_logged:
            self._log.warning("records lost", records=self.lost - self._lost_logged, **self._trouble)
            self._lost_logged = self.lost

    def close(self) -> None:
        """Write everything that can be written, and release the folder."""
        if self._ready():
            self._write()
            self._checkpoint()
        for part in (self._decisions, self._audit):
            if part is not None:
                part.close()
        if self._own is not None:
            self._own.close()
            self._own = None

    def _ready(self) -> bool:
        """Start if that is still to be done, and make the folder again if someone has removed it."""
        if self._to_start or self._own is None:
            return self.start()
        try:
            self._own.keep()
        except OSError as error:
            self._tell("folder", error)
            return False
        self._tell("folder", None)
        return True

    def _note(self, facts: Facts) -> None:
        if self._decisions is not None:
            self._decisions.add(facts.decision)
        if self._audit is not None:
            self._audit.add(facts)

    def _miss(self, requests: int) -> None:
        if self._decisions is not None:
            self._decisions.dropped += requests
        if self._audit is not None:
            self._audit.miss(requests)

    def _write(self) -> None:
        for name, part in (("decisions", self._decisions), ("audit", self._audit)):
            if part is None:
                continue
            try:
                part.flush()
            except OSError as error:
                self._tell(name, error)
            else:
                self._tell(name, None)

    def _checkpoint(self) -> None:
        try:
            self._ledger.checkpoint(self._audit.written if self._audit is not None else None)
        except OSError as error:
            self._tell("usage", error)
        else:
            self._tell("usage", None)
        while self._ledger.damaged:
            kept = self._ledger.damaged.pop()
            self._log.error(
                "a day's usage could not be read: counted anew, as far as the audit log has it", kept=str(kept)
            )

    def _tell(self, name: str, error: OSError | None) -> None:
        """Log when an error begins and ends, not every attempt."""
        why = f"{error.strerror}: {error.filename or self._root}" if error is not None else ""
        if self._trouble.get(name, "") == why:
            return
        if why:
            self._trouble[name] = why
            self._log.warning("records cannot be written", what=name, why=why)
        else:
            del self._trouble[name]
            self._log.info("records can be written again", what=name)
