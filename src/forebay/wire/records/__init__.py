"""Records of finished requests: decision frames, and audit lines in a hash chain. Sans-IO.

A decision file is a row of frames: four bytes that begin one, length, XXH3, MessagePack of up to some dozens of
decisions. What is damaged is skipped and counted, what is whole is read.

An audit file is JSON, one line each, in batches. The last line of a batch is its seal: it names the seal before it
(`prev`), says how many lines it is for, and ends with a SHA-256 (`hash`), taken over the bytes of these lines with
their newlines, and of itself without that last field. No batch goes on in another file; the chain goes on from file
to file. Its end is named by a head of its own: without one, nobody could tell that the last lines are gone.

Any change is found, and the batch that it is in. Which of its lines was changed cannot be told; which are missing
can, by their numbers. Lines that have no seal yet are shown as such: they are from the last moments of a gateway, or
of one that was stopped while it wrote. That one seals them when it comes up, and says so in a line (`late`).

Chains that lie beside each other are witnesses: each says now and then in a line of its own where the others end
(`witness`). So a chain that is gone, cut short or put back from an old copy is found by the lines of the others.

What that cannot show: that somebody rewrote all of a chain from some line on, head included, or added lines to its
end, since another one saw it last; nor anything done to all of them alike. Keep the hash of the head elsewhere from
time to time: a chain that is whole and holds that hash was not rewritten before it.
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
