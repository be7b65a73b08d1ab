"""What damage to a chain of audit lines looks like, and how it is found."""

from enum import StrEnum
from typing import NamedTuple

from forebay.wire.records.chain import Sealed, unseal
from forebay.wire.records.values import NOTHING, AuditLine, Event, Head


class Kind(StrEnum):
    """What is wrong with a chain."""

    NO_LINE = "not an audit line"
    CHANGED = "changed"
    MISSING = "missing"
    REPLACED = "replaced"
    OUT_OF_ORDER = "out of order"
    FOREIGN = "of another chain"
    NO_HEAD = "no head"
    ON_RECORD = "damage on record"


class Flaw(NamedTuple):
    """Damage, and where: `line` counts from 1 in its file; 0 is the end of the chain."""

    kind: Kind
    line: int
    text: str


class Verifier:
    """Checks a chain, line after line; `finish` has the last word. `head` is what was read before the first line.

    After damage it goes on with the next line that can be placed, so that one change is one flaw.
    """

    def __init__(self, name: str, head: Head | None, *, archived: bool = False) -> None:
        self.head = head
        self.last = Head()
        """The last line that was read."""
        self.ts: float | None = None
        """Time of the last line that is as it was written."""
        self.gaps: list[AuditLine] = []
        """Losses that the gateway itself put on record."""
        self._name = name
        self._archived = archived
        self._began: Head | None = None
        self._pruned: set[Head] = set()
        self._head_hash = NOTHING
        self._unplaced_first = 0
        self._next: dict[int, tuple[str, ...]] = {}
        """Which numbers the next line may have, and after which hashes; none: after any."""

    def feed(self, raw: bytes, number: int) -> Flaw | None:
        """Check the next line, given without its newline; `number` is its place in the file."""
        sealed = unseal(raw)
        if sealed is None:
            return self._unplaced(Kind.NO_LINE, number, "this is not an audit line")
        if not sealed.fits:
            return self._unplaced(Kind.CHANGED, number, "its content does not fit its hash", sealed)
        line = sealed.line
        flaw = self._place(line, number)
        self.last = Head(line.seq, sealed.hash)
        self.ts = line.ts
        self._next = {line.seq + 1: (sealed.hash,)}
        if self.head is not None and line.seq == self.head.seq:
            self._head_hash = sealed.hash
        if line.event == Event.GAP:
            self.gaps.append(line)
        elif line.event == Event.PRUNED:
            self._pruned.add(Head(line.pruned_seq, line.pruned_hash))
        elif line.event == Event.BROKEN and flaw is None:
            flaw = Flaw(Kind.ON_RECORD, number, line.why)
        if line.chain != self._name and flaw is None:
            flaw = Flaw(Kind.FOREIGN, number, f"it belongs to the chain {line.chain}")
        return flaw

    def finish(self) -> list[Flaw]:
        """What only the whole chain can show: lines that are gone from its beginning or its end."""
        flaws = []
        began, head, last = self._began, self.head, self.last
        if began is not None and began not in self._pruned and not self._archived:
            flaws.append(Flaw(Kind.MISSING, 1, f"{_lines(1, began.seq)} before it"))
        if head is None:
            flaws.append(Flaw(Kind.NO_HEAD, 0, "there is no head: lines may be missing at the end"))
        elif last.seq < head.seq:
            flaws.append(Flaw(Kind.MISSING, 0, f"{_lines(last.seq + 1, head.seq)} at the end"))
        elif self._head_hash != head.hash:
            flaws.append(Flaw(Kind.REPLACED, 0, f"line {head.seq} of the chain is not the one that the head names"))
        return flaws

    def _place(self, line: AuditLine, number: int) -> Flaw | None:
        seq, prev, expected = line.seq, line.prev, self.last.seq + 1
        if not self._next:  # the first line that could be read
            before = seq - 1 - self._unplaced_first
            if before > 0 or (not self._unplaced_first and prev != NOTHING):
                self._began = Head(before, prev)
            return None
        after = self._next.get(seq)
        if after is not None and (not after or prev in after):
            return None
        if after is not None:
            return Flaw(Kind.REPLACED, number, f"line {seq} of the chain does not follow the line before it")
        if seq > max(self._next):
            return Flaw(Kind.MISSING, number, f"{_lines(max(self._next), seq - 1)} before it")
        return Flaw(Kind.OUT_OF_ORDER, number, f"line {seq} of the chain stands where {expected} belongs")

    def _unplaced(self, kind: Kind, number: int, text: str, sealed: Sealed | None = None) -> Flaw:
        """A bad line takes the place of the next one, or was put between two."""
        hashes = (sealed.hash, sealed.computed) if sealed is not None else ()
        if self._next:
            place = max(self._next)
            self._next = {place: self._next[place], place + 1: hashes}
        else:
            place = self._unplaced_first = self._unplaced_first + 1
        self.last = Head(place, hashes[0] if hashes else NOTHING)
        if self.head is not None and place == self.head.seq:
            self._head_hash = self.head.hash  # one flaw is enough
        return Flaw(kind, number, text)


def _lines(first: int, last: int) -> str:
    return f"line {first} of the chain is missing" if first == last else f"lines {first} to {last} are missing"
