"""Decisions as frames in a file, and the candidates in them.

Candidates are packed when a replica is chosen and not when all has ended: a stream may last for hours, and packed
they take a fraction of the memory of their values.
"""

from struct import Struct as Layout
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.wire.documents import UNREADABLE
from forebay.wire.records.values import Candidate, Decision

MAGIC: Final = b"\xc1fb2"
"""Begins a frame. 0xC1 is no byte of UTF-8 and no type of MessagePack: a name that a client chose cannot look so."""
HEADER: Final = Layout("<4sIQ")
"""`MAGIC`, length and XXH3 of the payload that follows."""
FRAME_BYTES_MAX: Final = 262_144
"""Largest payload of a frame."""
CANDIDATES_MAX: Final = 32
"""Most candidates worth keeping of one decision: the best ones; `Decision.others` counts the rest."""
_pack_header: Final = HEADER.pack

_encode = msgspec.msgpack.Encoder().encode
_candidates = msgspec.msgpack.Decoder(list[Candidate]).decode
_unpack = msgspec.msgpack.Decoder(Decision).decode


def pack_candidates(rows: list[list[object]]) -> bytes:
    """Candidates for `Decision.candidates`: of each the fields of a `Candidate` in order, maybe without the last."""
    return _encode(rows)


def candidates(packed: msgspec.Raw) -> list[Candidate]:
    """Those of a decision; none if they are of a kind that this version does not know."""
    try:
        return _candidates(packed)
    except UNREADABLE:
        return []


def frame(decision: Decision) -> bytes:
    """A decision as it stands in a file; empty if it is longer than `FRAME_BYTES_MAX`."""
    payload = _encode(decision)
    size = len(payload)
    return _pack_header(MAGIC, size, xxh3_64_intdigest(payload)) + payload if size <= FRAME_BYTES_MAX else b""


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
        return None  # nothing is no record
    payload = data[start : start + size]
    return payload if xxh3_64_intdigest(payload) == check else None


def _next_frame(data: bytes, at: int) -> int:
    """Where the next whole frame begins, or the end."""
    while (at := data.find(MAGIC, at)) >= 0:
        if _payload_at(data, at) is not None:
            return at
        at += 1
    return len(data)
