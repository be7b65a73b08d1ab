"""Records of finished requests: decision frames, and audit lines in a hash chain. Sans-IO.

A decision file is a row of frames: four bytes that begin one, length, CRC-32, MessagePack. What is damaged is skipped
and counted, what is whole is read.

An audit file is JSON, one line each. A line names the one before it (`prev`) and ends with its own SHA-256 (`hash`),
taken over the bytes of the line without that last field; of one line this gives it too:
`sed 's/,"hash":"[0-9a-f]*"}$/}/' | tr -d '\\n' | sha256sum`. A chain goes on from file to file. Its end is named by a
head of its own: without one, nobody could tell that the last lines are gone.

What a chain cannot show: that somebody rewrote all of it from some line on, head included, or put back old copies of
files and head. Keep the hash of the head elsewhere from time to time: a chain that is whole and holds that hash was
not rewritten before it.
"""

import hashlib
import re
from enum import StrEnum
from struct import Struct as Layout
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from forebay.wire.documents import UNREADABLE

MAGIC: Final = b"\xc1fb1"
"""Begins a frame. 0xC1 is no byte of UTF-8 and no type of MessagePack: a name that a client chose cannot look so."""
HEADER: Final = Layout(">4sII")
FRAME_BYTES_MAX: Final = 262_144
"""Largest payload of a frame."""
CANDIDATES_MAX: Final = 32
"""Most candidates worth keeping of one decision: the best ones; `Decision.others` counts the rest."""
NOTHING: Final = "0" * 64
"""What the first line of a chain follows."""
LINE_BYTES_MAX: Final = 1024 * 1024
"""No audit line is longer: prompts are cut far below."""

# --- decisions


class Candidate(msgspec.Struct, array_like=True, gc=False):
    """A replica that was looked at, and every term of its score: seconds, 0 where the policy has no such term."""

    replica: str
    generation: int
    state: str
    load: int
    room: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    price_s: float = 0.0
    kv_s: float = 0.0
    handicap: float = 1.0
    total_s: float = 0.0
    hit_tokens: float = 0.0


class Attempt(msgspec.Struct, array_like=True, gc=False):
    """One try on a replica: why it was chosen, how that ended (`ok` or a reason), how long it took."""

    replica: str
    why: str
    outcome: str
    seconds: float


class Decision(msgspec.Struct, array_like=True, tag=1, gc=False):
    """What was decided about one request, and what came of it. `ts`: its end, seconds since the epoch.

    Fields may be added at the end, with a default: then old files can still be read.
    """

    ts: float
    request_id: str
    model: str
    tenant: str
    status: int
    code: str
    """`ok`, `client_closed` or an error code."""
    total_s: float
    policy: str = ""
    why: str = ""
    candidates: tuple[Candidate, ...] = ()
    others: int = 0
    """Candidates that are not listed."""
    chosen: str = ""
    """The replica that answered; empty if none was reached."""
    attempts: tuple[Attempt, ...] = ()
    queued_s: float = 0.0
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    estimated: bool = False
    """The tokens are the gateway's own count: no worker has told them, as of a cancelled stream."""
    resumed: int = 0
    """How often the stream went on elsewhere."""
    report_age_s: float = 0.0
    """Age of the chosen replica's load report when it was chosen."""
    asked: str = ""
    """The model's name in the request, if another one served it."""
    hit: str = ""
    """How it is known that the chosen replica holds a part of the prompt, a `core.routing.Source`."""


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Decision).decode


def frame(decision: Decision) -> bytes:
    """A decision as it stands in a file; empty if it is longer than `FRAME_BYTES_MAX`."""
    payload = _pack(decision)
    size = len(payload)
    return HEADER.pack(MAGIC, size, crc32(payload)) + payload if size <= FRAME_BYTES_MAX else b""


class Payloads(NamedTuple):
    """What a file holds: whole payloads in order, and how many stretches between them could not be read."""

    whole: list[bytes]
    damaged: int


def payloads(data: bytes) -> Payloads:
    """All whole frames, whatever lies between them."""
    whole: list[bytes] = []
    damaged = at = 0
    while at < len(data):
        payload = _payload_at(data, at)
        if payload is None:
            damaged += 1
            at = _next_frame(data, at + 1)
        else:
            whole.append(payload)
            at += HEADER.size + len(payload)
    return Payloads(whole, damaged)


def decision(payload: bytes) -> Decision | None:
    """The decision in a payload; None if it is of a kind that this version does not know."""
    try:
        return _unpack(payload)
    except UNREADABLE:
        return None


def _payload_at(data: bytes, at: int) -> bytes | None:
    if at + HEADER.size > len(data):
        return None
    magic, size, check = HEADER.unpack_from(data, at)
    start = at + HEADER.size
    if magic != MAGIC or not 0 < size <= FRAME_BYTES_MAX or start + size > len(data):
        return None  # nothing is no record, and zeros are the checksum of nothing
    payload = data[start : start + size]
    return payload if crc32(payload) == check else None


def _next_frame(data: bytes, at: int) -> int:
    """Where the next whole frame begins, or the end."""
    while (at := data.find(MAGIC, at)) >= 0:
        if _payload_at(data, at) is not None:
            return at
        at += 1
    return len(data)


# --- audit lines


class Event(StrEnum):
    """What an audit line is about."""

    REQUEST = "request"
    GAP = "gap"
    """Lines were lost because they could not be written: how many, and why."""
    BROKEN = "broken"
    """The gateway came up and could not tell whether the chain still had its end."""
    PRUNED = "pruned"
    """Files up to the line `pruned_seq` were removed by the gateway, as it was told to."""


class AuditLine(msgspec.Struct, gc=False, omit_defaults=True):
    """Which model was called, when, by whom, from where, with what outcome. Defaults are left out of the line."""

    seq: int
    prev: str
    chain: str
    event: str
    ts: float
    request_id: str = ""
    tenant: str = ""
    key: str = ""
    """Id of the API key, never the key."""
    client: str = ""
    """Address of the client."""
    path: str = ""
    model: str = ""
    revision: str = ""
    replica: str = ""
    status: int = 0
    code: str = ""
    ms: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    estimated: bool = False
    prompt: str = ""
    """The body of the request, if the cluster file says so."""
    lines: int = 0
    why: str = ""
    pruned_seq: int = 0
    pruned_hash: str = ""


class Head(msgspec.Struct, frozen=True):
    """The end of a chain: number and hash of its last line."""

    seq: int = 0
    hash: str = NOTHING


class Sealed(NamedTuple):
    """An audit line as read. `fits`: its hash is that of its bytes; else `computed` is what it should be."""

    line: AuditLine
    hash: str
    computed: str

    @property
    def fits(self) -> bool:
        """Whether nothing in the line was changed."""
        return self.hash == self.computed


_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder(AuditLine).decode
_SEAL: Final = re.compile(rb',"hash":"([0-9a-f]{64})"\}')
_SEAL_BYTES: Final = len(',"hash":""}') + 64


class Chain:
    """The writing end of a chain."""

    __slots__ = ("hash", "name", "seq")

    def __init__(self, name: str, head: Head) -> None:
        self.name = name
        self.seq = head.seq
        self.hash = head.hash

    @property
    def head(self) -> Head:
        """Where the chain ends now."""
        return Head(self.seq, self.hash)

    def seal(self, line: AuditLine) -> bytes:
        """The line as it is written, as the next one of the chain; `seq`, `prev` and `chain` are filled in."""
        self.seq = line.seq = self.seq + 1
        line.prev = self.hash
        line.chain = self.name
        body = _to_json(line)
        self.hash = digest = hashlib.sha256(body).hexdigest()
        return b'%b,"hash":"%b"}\n' % (body[:-1], digest.encode())


def unseal(raw: bytes) -> Sealed | None:
    """Take a line apart, given without its newline; None if it is none."""
    seal = _SEAL.fullmatch(raw, max(0, len(raw) - _SEAL_BYTES))
    if seal is None:
        return None
    body = raw[: seal.start()] + b"}"
    try:
        line = _from_json(body)
    except UNREADABLE:
        return None
    return Sealed(line, seal[1].decode(), hashlib.sha256(body).hexdigest())


# --- verifying


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
