"""Routing decisions as frames in a file, and the packed candidates in them.

Candidates are packed when a replica is chosen, not when the request ends: a stream may last for hours. Packing uses a
preallocated buffer: growing one takes longer than filling it. A frame holds several decisions for the same reason.
Frames of older versions hold one each; those can be read, too.
"""

from collections.abc import Sequence
from contextlib import suppress
from struct import Struct as Layout
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.wire.documents import UNREADABLE
from forebay.wire.records.values import Candidate, Decision

MAGIC: Final = b"\xc1fb2"
"""Begins a frame. 0xC1 occurs neither in UTF-8 nor as a MessagePack type: no name chosen by a client can imitate
it."""
HEADER: Final = Layout("<4sIQ")
"""`MAGIC`, length and XXH3 of the payload that follows."""
FRAME_BYTES_MAX: Final = 262_144
"""Largest payload of a frame."""
CANDIDATES_MAX: Final = 32
"""Most candidates kept of one decision, the best ones; `Decision.others` counts the rest."""
_pack_header: Final = HEADER.pack

_encode = msgspec.msgpack.Encoder().encode
_encode_into = msgspec.msgpack.Encoder().encode_into
_draft = bytearray()
_candidates = msgspec.msgpack.Decoder(list[Candidate]).decode
_unpack = msgspec.msgpack.Decoder(list[Decision]).decode
_unpack_one = msgspec.msgpack.Decoder(Decision).decode

Rows = Sequence[Sequence[object]]
"""Candidates: for each, the fields of a `Candidate` in order, possibly without the last."""


def packed(rows: Rows) -> msgspec.Raw:
    """Candidates packed for `Decision.candidates`, in a fraction of the memory of the values."""
    _encode_into(rows, _draft)
    return msgspec.Raw(bytes(_draft))


def candidates(packed: msgspec.Raw) -> list[Candidate]:
    """The candidates of a decision; none if this version does not know their format."""
    try:
        return _candidates(packed)
    except UNREADABLE:
        return []


def frame(decisions: Sequence[Decision]) -> bytes:
    """Decisions as a frame for a file; empty if they are longer than `FRAME_BYTES_MAX`."""
    payload = _encode(decisions)
    size = len(payload)
    return _pack_header(MAGIC, size, xxh3_64_intdigest(payload)) + payload if size <= FRAME_BYTES_MAX else b""


class Payloads(NamedTuple):
    """The complete payloads of a file in order, and how many stretches between them were unreadable."""

    whole: list[bytes]
    damaged: int


def payloads(data: bytes) -> Payloads:
    """The payloads of all complete frames, skipping damaged stretches."""
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


def decisions(payload: bytes) -> list[Decision]:
    """The decisions in a payload; none if this version does not know their format."""
    with suppress(*UNREADABLE):
        return _unpack(payload)
    with suppress(*UNREADABLE):
        return [_unpack_one(payload)]
    return []


def _payload_at(data: bytes, at: int) -> bytes | None:
    if at + HEADER.size > len(data):
        return None
    magic, size, check = HEADER.unpack_from(data, at)
    start = at + HEADER.size
    if magic != MAGIC or not 0 < size <= FRAME_BYTES_MAX or start + size > len(data):
        return None  # an empty payload is not a record
    payload = data[start : start + size]
    return payload if xxh3_64_intdigest(payload) == check else None


def _next_frame(data: bytes, at: int) -> int:
    """Where the next complete frame begins, or the end."""
    while (at := data.find(MAGIC, at)) >= 0:
        if _payload_at(data, at) is not None:
            return at
        at += 1
    return len(data)
