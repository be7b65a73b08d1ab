"""The audit log of one gateway: a chain of sealed batches (`wire.records`) over a series of files, and its head."""

import contextlib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

from forebay.core.tenancy import without_keys
from forebay.gateway.records.facts import Facts
from forebay.gateway.records.saved import (
    HEAD,
    SavedHead,
    counted_to,
    heads_beside,
    held_chain,
    read_saved_head,
    save_head,
)
from forebay.gateway.records.writer import Opener, Series, numbered, open_append
from forebay.obs.clock import wall_s
from forebay.wire.records import (
    LINE_BYTES_MAX,
    SEAL_BYTES_MAX,
    AuditLine,
    Chain,
    Event,
    Head,
    Seal,
    Who,
    audit_line,
    end_of,
    sound_lines,
    tail,
    unseal,
)

STEM: Final = "audit"
SUFFIX: Final = ".jsonl"
PROMPT_BYTES_MAX: Final = 65_536
"""Longer request bodies are truncated."""
BATCH_BYTES_MAX: Final = 256 * 1024
"""Larger batches are sealed before the next write: tampering can only be located to a batch."""
UNAUTHENTICATED_PER_MIN: Final = 60
"""Limit on lines about requests without a valid key, whatever is wrong with them: anyone can send those, and the log
is kept forever."""
WHOS_MAX: Final = 4096
"""Size of the cache of encoded clients; it is cleared when full."""
WITNESS_S: Final = 3600.0
"""How often the heads of other chains are recorded, if they have changed; every new file records all of them."""
FIRST_WITNESS_S: Final = 60.0
"""Delay of the first witness after the start, as the gateways of a cluster start together."""
UNAUTHENTICATED: Final = f"at most {UNAUTHENTICATED_PER_MIN} requests a minute without a valid key are recorded"
NOT_UP: Final = "the gateway could not open its records"
TOO_MANY: Final = "more lines came at once than can be buffered"
LATE: Final = "the gateway was stopped while writing"
KILLED: Final = "the gateway was killed: its last requests may be missing"
NO_HEAD: Final = "no readable head was found: lines before this one may be missing"
GONE: Final = "all files of the log were missing, and its head"
SEEN: Final = "where this chain ended"
_REQUEST: Final = Event.REQUEST  # looked up once: access to enum members is slow


class _Batch(NamedTuple):
    """A sealed batch still to be written: its last line number, and its number of requests."""

    seq: int
    requests: int


class AuditLog:
    """Writes the lines. What cannot be written yet is buffered in order up to a bound; a loss beyond it is a line
    too."""

    def __init__(self, bytes_max: int, files_max: int, prompts: bool, open_file: Opener = open_append) -> None:
        self.lost = 0
        """Requests without a line."""
        self.written = 0
        """Number of the last line in a file, sealed or not."""
        self._files_max = files_max
        self._prompts = prompts
        self._series = Series(STEM, SUFFIX, bytes_max, open_file)
        self._batch_bytes_max = min(BATCH_BYTES_MAX, bytes_max) - SEAL_BYTES_MAX
        self._batches: list[_Batch] = []
        self._requests = 0
        self._folder = Path()
        self._chain: Chain | None = None
        self._saved: SavedHead | None = None
        self._seen: dict[str, Head] = {}
        self._looked = 0.0
        self._whos: dict[tuple[str, str, str, str, bool], bytes] = {}
        self._gap = 0
        self._gap_why = TOO_MANY
        self._minute = 0.0
        self._unauthenticated = 0
        self._skipped = 0

    @property
    def behind(self) -> bool:
        """Whether lines, or a gap, are still to be written."""
        return bool(self._batches or self._gap or (self._chain is not None and self._chain.open_lines))

    def start(self, folder: Path) -> None:
        """Continue the existing chain, or begin one. Raises OSError.

        If files and head disagree, the chain continues from the later of the two, so that verification finds the
        missing lines however often the gateway restarts. Complete lines without a seal are sealed now.
        """
        files = numbered(folder, STEM, SUFFIX)
        head, end = read_saved_head(folder), _end(files)
        begin, broken = end, NO_HEAD if head is None and files else ""
        if head is not None and end.seq <= head.seq:
            begin = Head(head.seq, head.hash)
        elif head is None and not files and held_chain(folder):
            begin, broken = Head(counted_to(folder)), GONE  # so that the missing line numbers show
        if not broken:
            self._open(folder, head)
        unsealed, torn = _cut_torn(files[-1][1]) if files else (b"", 0)
        self._series.start(folder, cut=bool(unsealed))  # the seal of these lines belongs into the same file
        self._folder, self._chain = folder, Chain(folder.name, begin)
        self.written = begin.seq
        if unsealed:
            self._chain.take_up(unsealed)
            self.written = self._chain.seq
        late = self._chain.open_lines
        if broken:
            self._tell(Event.BROKEN, broken)
        if head is not None and head.open:
            self._tell(Event.KILLED, KILLED)
        if late:
            self._tell(Event.LATE, LATE, lines=late)
        if torn:
            why = f"an unfinished line of {torn} bytes was cut off: {LATE}"
            self._tell(Event.GAP, why, lines=1)
        self._look_around()
        self._looked += FIRST_WITNESS_S - WITNESS_S
        self._seal()

    def _open(self, folder: Path, head: SavedHead | None) -> None:
        """Mark the head as open. Raises OSError if it is the first head: a chain begins with it."""
        opened = SavedHead(head.seq, head.hash, open=True) if head is not None else SavedHead(open=True)
        try:
            save_head(folder, opened)
        except OSError:
            if head is None:
                raise
            return
        self._saved = opened

    def add(self, facts: Facts) -> None:
        """Add a request."""
        chain = self._chain
        if self._gap or chain is None or self._series.full:
            self.miss(1)
            if chain is None:
                self._gap_why = NOT_UP
            return
        if not facts.tenant and self._too_many(facts.ts):
            return
        who = self._who(facts)
        if chain.open_bytes + len(facts.line) + len(who) + SEAL_BYTES_MAX > self._batch_bytes_max:
            self._seal()
        chain.add_request(facts.line, who)
        self._requests += 1

    def miss(self, requests: int) -> None:
        """Count requests of which nothing else is known."""
        self._gap += requests
        self.lost += requests

    def _who(self, facts: Facts) -> bytes:
        """The end of a line: cached, as it is the same for all requests of one client."""
        key = (facts.tenant, facts.key, facts.client, facts.revision, facts.spent.estimated)
        known = self._whos.get(key) if not self._prompts else None
        if known is None:
            prompt = facts.prompt[:PROMPT_BYTES_MAX].decode("utf-8", "replace") if self._prompts else ""
            if "fb-" in prompt:  # looked for first: the search costs milliseconds in a long prompt
                prompt = without_keys(prompt)
            known = tail(Who(*key, prompt))
            if len(self._whos) >= WHOS_MAX:
                self._whos.clear()
            self._whos[key] = known
        return known

    def flush(self) -> None:
        """Write the buffered lines, then the head. Raises OSError if some remain, to be retried at the next call."""
        chain = self._chain
        assert chain is not None, "flush() before start()"
        number = self._series.number
        try:
            self._write()
        except OSError as error:
            self._gap_why = f"lines could not be written: {error.strerror or error}"
            raise
        fresh = bool(number) and self._series.number != number
        if fresh or not 0 <= wall_s() - self._looked < WITNESS_S:
            self._look_around(again=fresh)
        if self._gap:
            self._tell(Event.GAP, self._gap_why, lines=self._gap)
            self._gap, self._gap_why = 0, TOO_MANY
        if self._skipped and not 0 <= wall_s() - self._minute < 60.0:
            self._tell_skipped()
        self._write()
        if self._files_max and self._series.number != number:
            self._prune()
        self._save(SavedHead(chain.seq, chain.hash, open=True))

    def close(self) -> None:
        """Close the file; lines still buffered are lost."""
        if self._skipped:
            self._tell_skipped()
            with contextlib.suppress(OSError):
                self.flush()
        if self._chain is not None and not self.behind:  # otherwise the next start reports that lines may be missing
            with contextlib.suppress(OSError):
                self._save(SavedHead(self._chain.seq, self._chain.hash))
        self.lost += self._requests
        for batch in self._batches:
            self.lost += min(batch.requests, batch.seq - self.written)
        self._series.close()

    def _save(self, head: SavedHead) -> None:
        if head != self._saved or not (self._folder / HEAD).exists():
            save_head(self._folder, head)
            self._saved = head

    def _look_around(self, *, again: bool = False) -> None:
        """Record where the other chains end: those that have changed, or all of them with `again`."""
        chain = self._chain
        assert chain is not None
        self._looked = wall_s()
        for name, head in heads_beside(self._folder).items():
            if not again and self._seen.get(name) == head:
                continue
            self._seen[name] = head
            if chain.open_bytes + 2 * SEAL_BYTES_MAX > self._batch_bytes_max:
                self._seal()
            line = AuditLine(0, Event.WITNESS, wall_s(), why=SEEN)
            line.other, line.other_seq, line.other_hash = name, head.seq, head.hash
            chain.add(line)

    def _seal(self) -> None:
        """Seal the open batch."""
        chain = self._chain
        assert chain is not None
        if chain.open_lines:
            self._series.add(chain.seal(wall_s()))
            self._batches.append(_Batch(chain.seq, self._requests))
            self._requests = 0

    def _write(self) -> None:
        """Write everything. Raises OSError if some remains."""
        self._seal()
        try:
            self._series.write()
        finally:
            held, done = self._series.held, len(self._batches) - len(self._series.held)
            if done:
                self.written = self._batches[done - 1].seq
                del self._batches[:done]
            if held:  # lines and seal of the first batch that is not completely in the file
                self.written = self._batches[0].seq + 1 - held[0].count(b"\n")

    def _too_many(self, ts: float) -> bool:
        """Count a request without a valid key, and say whether it is over the limit; `ts`: its end, seconds since the
        epoch."""
        if not 0 <= ts - self._minute < 60.0:
            if self._skipped:
                self._tell_skipped()
            self._minute, self._unauthenticated = ts, 0
        self._unauthenticated += 1
        self._skipped += self._unauthenticated > UNAUTHENTICATED_PER_MIN
        return self._unauthenticated > UNAUTHENTICATED_PER_MIN

    def _tell_skipped(self) -> None:
        self._tell(Event.SKIPPED, UNAUTHENTICATED, lines=self._skipped)
        self._skipped = 0

    def _tell(self, event: Event, why: str, lines: int = 0, pruned: Head | None = None) -> None:
        """Add a line about the log itself."""
        assert self._chain is not None
        line = AuditLine(0, event, wall_s(), why=why, lines=lines)
        if pruned is not None:
            line.pruned_seq, line.pruned_hash = pruned.seq, pruned.hash
        self._chain.add(line)

    def _prune(self) -> None:
        """Remove the oldest files, after recording where the chain now begins."""
        files = [path for _, path in self._series.files()]
        surplus, kept = files[: -self._files_max], files[-self._files_max :]
        first = _first_seal(kept[0]) if surplus else None
        if first is None:
            return
        self._tell(Event.PRUNED, f"at most {self._files_max} files are kept", pruned=first.before)
        self._write()
        for path in surplus:
            path.unlink(missing_ok=True)


def lines_after(folder: Path, seq: int, files_max: int) -> Iterator[AuditLine]:
    """The request lines after line `seq`, from the newest `files_max` files. Raises OSError."""
    newest_first = numbered(folder, STEM, SUFFIX)[: -files_max - 1 : -1]
    later = list(takewhile(lambda item: not (first := _first_line(item[1])) or first.seq > seq + 1, newest_first))
    for _, path in reversed(newest_first[: len(later) + 1]):
        with path.open("rb") as file:
            for line in sound_lines(file):
                if line.seq > seq and line.event == _REQUEST:
                    yield line


def _first_line(path: Path) -> AuditLine | None:
    with path.open("rb") as file:
        return audit_line(file.readline(LINE_BYTES_MAX).rstrip(b"\n"))


def _first_seal(path: Path) -> Seal | None:
    with path.open("rb") as file:
        for raw in file:
            seal = unseal(raw.rstrip(b"\n"))
            if seal is not None:
                return seal
    return None


def _end(files: list[tuple[int, Path]]) -> Head:
    """Where the chain ends according to its files."""
    for _, path in reversed(files):
        seal = end_of(path.read_bytes()).seal
        if seal is not None:
            return Head(seal.line.seq, seal.hash)
    return Head()


def _cut_torn(path: Path) -> tuple[bytes, int]:
    """Truncate the file after its last complete line. Returns the lines without a seal, and how many bytes were cut
    off."""
    end = end_of(path.read_bytes())
    if end.torn_bytes:
        with path.open("rb+") as file:
            file.truncate(file.seek(0, 2) - end.torn_bytes)
    return end.unsealed, end.torn_bytes
