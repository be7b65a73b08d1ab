"""Verifies chains of audit lines, and classifies damage."""

import hashlib
from enum import StrEnum
from typing import NamedTuple

from forebay.wire.records.chain import Seal, audit_line, unseal
from forebay.wire.records.values import NOTHING, AuditLine, Event, Head


class Kind(StrEnum):
    """Kinds of damage to a chain."""

    NO_LINE = "not an audit line"
    CHANGED = "changed"
    MISSING = "missing"
    REPLACED = "replaced"
    OUT_OF_ORDER = "out of order"
    FOREIGN = "of another chain"
    UNSEALED = "not sealed"
    NO_HEAD = "no head"
    ON_RECORD = "damage on record"


class Flaw(NamedTuple):
    """Damage and its place: `line` counts from 1 in its file; 0 is the end of the chain."""

    kind: Kind
    line: int
    text: str


class _Batch:
    """Lines whose seal has not been read yet. `jump`: the first line that does not follow its predecessor."""

    def __init__(self) -> None:
        self.sum = hashlib.sha256()
        self.number = 0
        self.first: AuditLine | None = None
        self.last: AuditLine | None = None
        self.jump: Flaw | None = None
        self.told = False
        """Whether damage in it has been reported."""
        self.events: list[tuple[AuditLine, int]] = []

    def add(self, line: AuditLine, number: int) -> None:
        if self.last is None:
            self.first = line
        elif self.jump is None:
            self.jump = _jump(self.last.seq + 1, line.seq, number)
        self.last = line
        if line.event != Event.REQUEST:
            self.events.append((line, number))


class Verifier:
    """Verifies a chain line by line; call `finish` at the end. `head` is the head read before the first line.

    After damage it continues at the next seal, so that one change is one flaw. `wanted`: lines whose seals other
    chains have recorded.
    """

    def __init__(
        self, name: str, head: Head | None, *, archived: bool = False, wanted: frozenset[int] = frozenset()
    ) -> None:
        self.head = head
        self.last = Head()
        """The last seal that was read."""
        self.times: tuple[float, float] | None = None
        """Of the first and the last line of the last intact batch."""
        self.gaps: list[AuditLine] = []
        """Losses and late seals that the gateway itself has recorded."""
        self.witnessed: list[AuditLine] = []
        """What this chain has recorded of other chains."""
        self._name = name
        self._archived = archived
        self._began: Head | None = None
        self._pruned: set[Head] = set()
        self._head_hash = NOTHING
        self._wanted = wanted
        self._seals: dict[int, str] = {}
        self._sealed_to = 0
        self._batch = _Batch()
        self._after: tuple[str, ...] = ()
        """Hashes that the next seal may refer to; empty: any, it is the first."""

    def feed(self, raw: bytes, number: int) -> Flaw | None:
        """Check the next line, given without its newline; `number` is its line number in the file."""
        batch = self._batch
        batch.number = batch.number or number
        seal = unseal(raw)
        if seal is not None:
            self._batch = _Batch()
            return self._sealed(batch, seal, number)
        batch.sum.update(raw + b"\n")
        line = audit_line(raw)
        if line is not None and line.event != Event.SEAL:
            batch.add(line, number)
            return None
        told, batch.told = batch.told, True
        return None if told else Flaw(Kind.NO_LINE, number, "this is not an audit line")

    def end_file(self) -> Flaw | None:
        """Another file follows, in which no batch continues: unsealed lines are damage."""
        batch, self._batch = self._batch, _Batch()
        if not batch.number or batch.told:
            return None
        return Flaw(Kind.UNSEALED, batch.number, "the lines from here on have no seal")

    def finish(self) -> list[Flaw]:
        """The flaws that only the whole chain shows: lines missing at its beginning or its end."""
        flaws = []
        began, head, last = self._began, self.head, self.last
        if began is not None and began not in self._pruned and not self._archived:
            text = f"{_lines(1, began.seq)} before it" if began.seq else "the seal that it names is missing"
            flaws.append(Flaw(Kind.MISSING, 1, text))
        if head is None:
            flaws.append(Flaw(Kind.NO_HEAD, 0, "there is no head: lines may be missing at the end"))
        elif last.seq < head.seq:
            if not self._batch.told:
                flaws.append(Flaw(Kind.MISSING, 0, f"{_lines(last.seq + 1, head.seq)} at the end"))
        elif self._head_hash != head.hash:
            flaws.append(Flaw(Kind.REPLACED, 0, f"line {head.seq} of the chain is not the one that the head names"))
        return flaws

    @property
    def reach(self) -> int:
        """Number of the last line, sealed or not."""
        last = self._batch.last
        return max(self._sealed_to, last.seq if last is not None else 0)

    def against(self, seen: Head, by: str) -> Flaw | None:
        """Check this chain, already read to its end, against a head of it that the chain `by` has recorded.

        If that line has been pruned since, nothing can be said.
        """
        told = f"the chain {by} has seen line {seen.seq} of it"
        if self._sealed_to < seen.seq:
            return Flaw(Kind.MISSING, 0, f"{_lines(self._sealed_to + 1, seen.seq)} at the end: {told}")
        began = self._began or Head()
        if seen.seq < began.seq:
            return None
        found = began.hash if seen.seq == began.seq else self._seals.get(seen.seq)
        return None if found == seen.hash else Flaw(Kind.REPLACED, 0, f"{told}, and that was another one")

    def _sealed(self, batch: _Batch, seal: Seal, number: int) -> Flaw | None:
        batch.sum.update(seal.body)
        computed = batch.sum.hexdigest()
        fits = seal.hash == computed
        flaw = self._whole(batch, seal, number) if fits else _damage(batch, seal, number)
        if batch.told:
            flaw = None
        if self.head is not None and seal.line.seq == self.head.seq:
            self._head_hash = seal.hash if fits else self.head.hash  # one flaw is enough
        if seal.line.seq in self._wanted:
            self._seals[seal.line.seq] = seal.hash
        self._sealed_to = max(self._sealed_to, seal.line.seq)
        self.last = Head(seal.line.seq, seal.hash)
        self._after = (seal.hash,) if fits else (seal.hash, computed)
        return flaw

    def _whole(self, batch: _Batch, seal: Seal, number: int) -> Flaw | None:
        """The batch matches its seal; check whether it is in the right place."""
        flaw = self._place(batch, seal)
        if batch.first is not None and batch.last is not None:
            self.times = batch.first.ts, batch.last.ts
        for line, at in batch.events:
            if line.event in (Event.GAP, Event.LATE, Event.KILLED):
                self.gaps.append(line)
            elif line.event == Event.WITNESS:
                self.witnessed.append(line)
            elif line.event == Event.PRUNED:
                self._pruned.add(Head(line.pruned_seq, line.pruned_hash))
            elif line.event == Event.BROKEN and flaw is None:
                flaw = Flaw(Kind.ON_RECORD, at, line.why)
        if seal.line.chain != self._name and flaw is None:
            flaw = Flaw(Kind.FOREIGN, number, f"it belongs to the chain {seal.line.chain}")
        return flaw

    def _place(self, batch: _Batch, seal: Seal) -> Flaw | None:
        before = seal.before
        if not self._after:
            if before != Head():
                self._began = before
            return None
        if before.hash in self._after:
            return None
        first = before.seq + 1
        text = f"line {first} of the chain does not follow the line before it"
        return _jump(self.last.seq + 1, first, batch.number) or Flaw(Kind.REPLACED, batch.number, text)


def _damage(batch: _Batch, seal: Seal, number: int) -> Flaw:
    """Classify the damage to a batch that does not match its seal; `number` is the line number of the seal."""
    first, last = batch.first, batch.last
    flaw = batch.jump
    if first is not None and first.seq > seal.before.seq + 1:
        flaw = _jump(seal.before.seq + 1, first.seq, batch.number)
    if flaw is None and last is not None and last.seq < seal.line.seq:
        flaw = _jump(last.seq + 1, seal.line.seq + 1, number)
    if flaw is None:
        place = f"lines {batch.number} to {number} do" if batch.number < number else "the seal does"
        flaw = Flaw(Kind.CHANGED, batch.number, f"{place} not fit the hash in line {number}")
    return flaw


def _jump(expected: int, seq: int, number: int) -> Flaw | None:
    if seq == expected:
        return None
    if seq > expected:
        return Flaw(Kind.MISSING, number, f"{_lines(expected, seq - 1)} before it")
    return Flaw(Kind.OUT_OF_ORDER, number, f"line {seq} of the chain stands where {expected} belongs")


def _lines(first: int, last: int) -> str:
    return f"line {first} of the chain is missing" if first == last else f"lines {first} to {last} are missing"
