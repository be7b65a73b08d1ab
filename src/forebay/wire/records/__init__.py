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

from forebay.wire.records.chain import LINE_BYTES_MAX, Chain, Sealed, unseal
from forebay.wire.records.frames import (
    CANDIDATES_MAX,
    FRAME_BYTES_MAX,
    HEADER,
    MAGIC,
    Payloads,
    decision,
    frame,
    payloads,
)
from forebay.wire.records.values import NOTHING, Attempt, AuditLine, Candidate, Decision, Event, Head
from forebay.wire.records.verify import Flaw, Kind, Verifier

__all__ = [
    "CANDIDATES_MAX",
    "FRAME_BYTES_MAX",
    "HEADER",
    "LINE_BYTES_MAX",
    "MAGIC",
    "NOTHING",
    "Attempt",
    "AuditLine",
    "Candidate",
    "Chain",
    "Decision",
    "Event",
    "Flaw",
    "Head",
    "Kind",
    "Payloads",
    "Sealed",
    "Verifier",
    "decision",
    "frame",
    "payloads",
    "unseal",
]
