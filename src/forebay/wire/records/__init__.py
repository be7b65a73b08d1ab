"""Records of finished requests: decision frames, and audit lines in a hash chain. Sans-IO.

A decision file is a sequence of frames: four magic bytes, length, XXH3, MessagePack of up to some dozens of
decisions. Damaged stretches are skipped and counted, intact frames are read.

An audit file holds one JSON line per record, in batches. The last line of a batch is its seal: it names the previous
seal (`prev`) and the number of its lines, and ends with a SHA-256 (`hash`) over the bytes of these lines with their
newlines, and of the seal itself without that last field. A batch never spans two files; the chain continues across
files. Its end is recorded in a separate head: without it, missing last lines would go unnoticed.

Any change is detected, along with the batch that contains it. Which line was changed cannot be determined; which are
missing can, by their numbers. Lines without a seal are reported as such: they are from the last moments of a gateway,
or of one that was stopped while writing. It seals them when it starts again, and records that in a line (`late`).

Neighbouring chains witness each other: each regularly records in a line where the others end (`witness`). So a chain
that is removed, truncated or restored from an old copy is detected by the lines of the others.

What this cannot detect: that someone rewrote all of a chain from some line on, head included, or appended lines,
since it was last witnessed; nor anything done to all chains alike. Store the hash of the head elsewhere from time to
time: an intact chain that contains that hash was not rewritten before it.
"""

from forebay.wire.records.chain import (
    LINE_BYTES_MAX,
    SEAL_BYTES_MAX,
    Chain,
    End,
    Seal,
    audit_line,
    end_of,
    is_witness,
    sound_lines,
    tail,
    unseal,
)
from forebay.wire.records.frames import (
    CANDIDATES_MAX,
    FRAME_BYTES_MAX,
    HEADER,
    MAGIC,
    Payloads,
    candidates,
    decisions,
    frame,
    packed,
    payloads,
)
from forebay.wire.records.values import (
    NO_CANDIDATES,
    NOTHING,
    Attempt,
    AuditLine,
    Candidate,
    Decision,
    Event,
    Head,
    Who,
)
from forebay.wire.records.verify import Flaw, Kind, Verifier

__all__ = [
    "CANDIDATES_MAX",
    "FRAME_BYTES_MAX",
    "HEADER",
    "LINE_BYTES_MAX",
    "MAGIC",
    "NOTHING",
    "NO_CANDIDATES",
    "SEAL_BYTES_MAX",
    "Attempt",
    "AuditLine",
    "Candidate",
    "Chain",
    "Decision",
    "End",
    "Event",
    "Flaw",
    "Head",
    "Kind",
    "Payloads",
    "Seal",
    "Verifier",
    "Who",
    "audit_line",
    "candidates",
    "decisions",
    "end_of",
    "frame",
    "is_witness",
    "packed",
    "payloads",
    "sound_lines",
    "tail",
    "unseal",
]
