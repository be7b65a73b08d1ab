"""The one place that a gateway tells of finished requests: decisions, audit and ledger behind one call.

Serving never fails for the sake of records: what goes wrong with files is logged and tried again at the next `flush`,
and what is lost is counted.
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
"""What a decision is taken for while it waits; most are smaller."""


class _Meanwhile:
    """What ends while a thread has the books. Of what is too much, only the ledger knows."""

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
    """The records of one gateway process. `gateway` is its id; of one id, each process has its own folder."""

    def __init__(
        self,
        spec: RecordsSpec,
        gateway: str,
        log: structlog.stdlib.BoundLogger,
        open_file: Opener = open_append,
    ) -> None:
        self.prompts = spec.audit and spec.prompts
        """Whether `Facts.prompt` is wanted."""
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
        self._told = 0
        self._meanwhile: _Meanwhile | None = None

    @property
    def lost(self) -> int:
        """Records that are in no file: decisions, and requests that no audit line tells of."""
        return (self._decisions.dropped if self._decisions else 0) + (self._audit.lost if self._audit else 0)

    def start(self) -> bool:
        """Take the folder and go on where the last process stopped; call it before the first request is served.

        False if that cannot be done yet: then every `flush` tries again, and the audit log will say how many requests
        came until then.
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
        """A request has ended."""
        if self._meanwhile is not None:
            self._meanwhile.add(facts)
            return
        self._note(facts)
        self._ledger.count(facts.ts, facts.tenant, facts.model, facts.code, facts.spent)

    async def flush_aside(self, now: float) -> None:
        """`flush` on another thread: a disk that stalls, as disks do for a second, then holds up no request.

        The books are that thread's until it has done, also if this is cancelled. What ends meanwhile is noted after
        it.
        """
        self._meanwhile = _Meanwhile()
        flushed = asyncio.get_running_loop().run_in_executor(None, self.flush, now)
        cancelled: asyncio.CancelledError | None = None
        while not flushed.done():
            try:
                await asyncio.wait((flushed,))
            except asyncio.CancelledError as error:  # the thread goes on; compiled code waits in no handler
                cancelled = error
        late, self._meanwhile = self._meanwhile, None
        self._ledger.take(late.ledger)
        for facts in late.waiting:
            self._note(facts)
        if late.missed:
            self._miss(late.missed)
        if cancelled is not None:
            raise cancelled
        flushed.result()

    def flush(self, now: float) -> None:
        """Write what has come in. `now`: seconds by a clock that never goes back."""
        if self._to_start and not self.start():
            return
        self._write()
        if now < self._checkpoint_at:
            return
        self._checkpoint_at = now + CHECKPOINT_S
        if self._ledger.dirty and not (self._audit is not None and self._audit.behind):
            self._checkpoint()  # else the lines that are still to be written will tell
        if self.lost > self._told:
            self._log.warning("records lost", records=self.lost - self._told, **self._trouble)
            self._told = self.lost

    def close(self) -> None:
        """Write all that can be written, and let go of the folder."""
        if not self._to_start or self.start():
            self._write()
            self._checkpoint()
        for part in (self._decisions, self._audit):
            if part is not None:
                part.close()
        if self._own is not None:
            self._own.close()
            self._own = None

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

    def _tell(self, name: str, error: OSError | None) -> None:
        """Log what begins and what ends, not every attempt."""
        why = f"{error.strerror}: {error.filename or self._root}" if error is not None else ""
        if self._trouble.get(name, "") == why:
            return
        if why:
            self._trouble[name] = why
            self._log.warning("records cannot be written", what=name, why=why)
        else:
            del self._trouble[name]
            self._log.info("records are written again", what=name)
