"""What gateways have written down of requests, as the admin API tells it, and who reads it. Values and a protocol."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

import msgspec

from forebay.wire.admin_request import UsageAsked
from forebay.wire.records import Attempt, AuditLine, Candidate, Decision, Head

USAGE_ROWS_MAX: Final = 50_000
"""An answer with more is refused, as a part of a sum is worse than none."""
TAIL_BYTES_MAX: Final = 4 * 1024 * 1024
"""Lines that hold prompts are long: fewer of them than were asked for may be told."""

Still = Callable[[], None]
"""Called between two files; raises if reading is to end."""


class CandidateDocument(Candidate, array_like=False):
    """A replica that was looked at, and the terms of its score, seconds."""


class AttemptDocument(Attempt, array_like=False):
    """One try on a replica."""


class DecisionDocument(Decision, array_like=False, tag=False, kw_only=True):
    """How one request was routed and what came of it. `ts`: its end, seconds since the epoch."""

    gateway: str
    candidates: tuple[CandidateDocument, ...] = ()  # type: ignore[assignment]  # packed in files only
    attempts: tuple[AttemptDocument, ...] = ()


@dataclass(frozen=True, slots=True)
class Decisions:
    """The newest records of one request, oldest first; clients may use an id more than once."""

    decisions: tuple[DecisionDocument, ...]
    damaged: int
    """Stretches of files that could not be read."""


class UsageRow(msgspec.Struct, frozen=True):
    """What was used on a day (UTC) by a tenant of a model, with one outcome: `ok`, `cancelled`, or whose fault."""

    day: str
    tenant: str
    model: str
    outcome: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    estimated: int
    """Requests whose tokens are the gateway's own count."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What all gateways together have counted, by day."""

    rows: tuple[UsageRow, ...]


Line = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
"""A line as it stands in the log."""


@dataclass(frozen=True, slots=True)
class AuditTail:
    """The newest lines of all chains, by time."""

    chains: tuple[str, ...]
    lines: tuple[Line, ...]
    cut: bool
    """Whether lines that were asked for are left out, as all together are too long."""


@dataclass(frozen=True, slots=True)
class FlawDocument:
    """Damage. `line` counts from 1 in its file; 0: it is the end of the chain."""

    kind: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class FileDocument:
    """What was found in a file of the log. Times: seconds since the epoch; null: no line could be read."""

    name: str
    lines: int
    first: float | None
    last: float | None
    flaws: tuple[FlawDocument, ...]
    flaws_more: int
    """Flaws that are not listed."""
    unfinished_bytes: int
    """At the end of the newest file, without a seal yet."""


@dataclass(frozen=True, slots=True)
class ChainDocument:
    """What was found in the log of one gateway. `flaws` are those that belong to no file."""

    ok: bool
    chain: str
    head: Head | None
    files: tuple[FileDocument, ...]
    flaws: tuple[FlawDocument, ...]
    gaps: tuple[AuditLine, ...]
    """Lines that were lost, or sealed late, as the log itself says."""


@dataclass(frozen=True, slots=True)
class AuditVerified:
    """Whether nothing was changed or removed."""

    ok: bool
    chains: tuple[ChainDocument, ...]


class Records(Protocol):
    """Reads the records of the gateways of this machine. All of it blocks, and raises OSError."""

    def decisions(self, request_id: str, still: Still) -> Decisions:
        """How a request was routed; none: no record of it is left."""

    def usage(self, wanted: UsageAsked, still: Still) -> Usage:
        """What was used."""

    def tail(self, last: int, bytes_max: int | None, still: Still) -> AuditTail:
        """The newest lines of the audit log, as many of them as are no longer than `bytes_max`; None: any length."""

    def verify(self, archived: bool, still: Still) -> AuditVerified:
        """Check the whole audit log. `archived`: its oldest files, or whole folders, were moved."""
