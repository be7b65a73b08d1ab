"""Audit lines as a chain: each names the one before it, and ends with its own hash."""

import hashlib
import re
from typing import Final, NamedTuple

import msgspec

from forebay.wire.documents import UNREADABLE
from forebay.wire.records.values import AuditLine, Head

LINE_BYTES_MAX: Final = 1024 * 1024
"""No audit line is longer: prompts are cut far below."""


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
