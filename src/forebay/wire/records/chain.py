"""The audit chain: the lines of a batch are sealed together, and each seal names the previous one."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from forebay.wire.documents import UNREADABLE
from forebay.wire.records.values import AuditLine, Event, Head, Who

LINE_BYTES_MAX: Final = 1024 * 1024
"""No audit line is longer: prompts are truncated far below."""
SEAL_BYTES_MAX: Final = 1024
"""No seal is longer, unless a gateway has a very long name."""


class Seal(NamedTuple):
    """A parsed seal: its values, the bytes that its hash covers besides those of its lines, the hash."""

    line: AuditLine
    body: bytes
    hash: str

    @property
    def before(self) -> Head:
        """The head that its first line follows."""
        return Head(self.line.seq - self.line.lines, self.line.prev)


class End(NamedTuple):
    """The end of a file: its last seal, if there is one, the complete lines after it, and the bytes after these."""

    seal: Seal | None
    unsealed: bytes
    torn_bytes: int


_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder(AuditLine).decode
_SEAL: Final = re.compile(rb',"hash":"([0-9a-f]{64})"\}')
_WITNESS: Final = b'"event":"witness"'
_BEGIN_BYTES: Final = 64
"""The number and event of a line about the log itself are within this prefix."""
_HASH_BYTES: Final = len(',"hash":""}') + 64


class Chain:
    """The writing end of a chain: lines are added, then sealed."""

    __slots__ = ("_found", "_lines", "hash", "name", "open_bytes", "open_lines", "seq")

    def __init__(self, name: str, head: Head) -> None:
        self.name = name
        self.seq = head.seq
        """Number of the last line."""
        self.hash = head.hash
        """The hash of the last seal."""
        self.open_lines = 0
        """The number of lines since then."""
        self.open_bytes = 0
        """The size of those of these lines that are not in a file yet."""
        self._lines: list[bytes] = []
        self._found = b""

    @property
    def head(self) -> Head:
        """The end of the chain; read it only when everything is sealed."""
        return Head(self.seq, self.hash)

    def take_up(self, unsealed: bytes) -> None:
        """Include these complete lines, which are in the file already, in the next seal."""
        self._found = unsealed
        for raw in unsealed.splitlines():
            line = audit_line(raw)
            self.seq = max(self.seq, line.seq) if line is not None else self.seq
            self.open_lines += 1

    def add(self, line: AuditLine) -> None:
        """Add a line about the log itself; its `seq` is filled in."""
        line.seq = self.seq + 1
        self._add(_to_json(line) + b"\n")

    def add_request(self, line: bytes, who: bytes) -> None:
        """Add the line of a request: that of the access log, a JSON object, its number, and the result of `tail`."""
        self._add(b'%b,"seq":%b%b' % (line[:-1], str(self.seq + 1).encode(), who))

    def _add(self, raw: bytes) -> None:
        self.seq += 1
        self.open_lines += 1
        self.open_bytes += len(raw)
        self._lines.append(raw)

    def seal(self, ts: float) -> bytes:
        """All lines added since the last seal, and their seal, as bytes to be written. `ts`: now, seconds since the
        epoch.

        There must be at least one line.
        """
        lines = b"".join(self._lines)
        seal = AuditLine(self.seq, Event.SEAL, ts, lines=self.open_lines, prev=self.hash, chain=self.name)
        body = _to_json(seal)
        digest = hashlib.sha256(self._found + lines if self._found else lines)
        digest.update(body)
        self.hash = digest.hexdigest()
        self._lines, self._found = [], b""
        self.open_lines = self.open_bytes = 0
        return b'%b%b,"hash":"%b"}\n' % (lines, body[:-1], self.hash.encode())


def tail(who: Who) -> bytes:
    """The end of request lines with these audit fields, to be reused."""
    fields = _to_json(who)
    return b"}\n" if fields == b"{}" else b",%b\n" % fields[1:]


def unseal(raw: bytes) -> Seal | None:
    """Parse a seal, given without its newline; None if it is not one."""
    found = _SEAL.fullmatch(raw, max(0, len(raw) - _HASH_BYTES))
    if found is None:
        return None
    body = raw[: found.start()] + b"}"
    line = audit_line(body)
    return Seal(line, body, found[1].decode()) if line is not None and line.event == Event.SEAL else None


def audit_line(raw: bytes) -> AuditLine | None:
    """Parse a line, given without its newline; None if it is not one."""
    try:
        return _from_json(raw)
    except UNREADABLE:
        return None


def is_witness(raw: bytes) -> bool:
    """Whether a line is a witness of another chain. A request's line never looks like one."""
    return _WITNESS in raw[:_BEGIN_BYTES]


def sound_lines(raws: Iterable[bytes]) -> Iterator[AuditLine]:
    """The lines of a file by intact batch, and those after the last seal. With newlines."""
    batch: list[bytes] = []
    for raw in raws:
        seal = unseal(raw.rstrip(b"\n"))
        if seal is None:
            batch.append(raw)
            continue
        digest = hashlib.sha256(b"".join(batch))
        digest.update(seal.body)
        if digest.hexdigest() == seal.hash:
            yield from _lines_in(batch)
        batch = []
    yield from _lines_in(batch)


def _lines_in(raws: list[bytes]) -> Iterator[AuditLine]:
    for raw in raws:
        line = audit_line(raw)
        if line is not None:
            yield line


def end_of(content: bytes) -> End:
    """Find the end of the chain in a file's content."""
    whole = end = content.rfind(b"\n") + 1
    while end:
        begin = content.rfind(b"\n", 0, end - 1) + 1
        seal = unseal(content[begin : end - 1])
        if seal is not None:
            return End(seal, content[end:whole], len(content) - whole)
        end = begin
    return End(None, content[:whole], len(content) - whole)
