"""The gateways' records of requests as documents of the admin API, and the protocol for reading them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

import msgspec

from forebay.wire.admin_request import UsageRequest
from forebay.wire.records import Attempt, AuditLine, Candidate, Decision, Head

USAGE_ROWS_MAX: Final = 50_000
"""A larger response is rejected, as a partial sum is worse than none."""
TAIL_BYTES_MAX: Final = 4 * 1024 * 1024
"""Lines that hold prompts are long: fewer than requested may be returned."""

Still = Callable[[], None]
"""Called between two files; raises to stop reading."""


class CandidateDocument(Candidate, array_like=False):
    """A replica that was considered, and the terms of its score, in seconds."""


class AttemptDocument(Attempt, array_like=False):
    """One attempt on a replica."""


class DecisionDocument(Decision, array_like=False, tag=False, kw_only=True):
    """The routing decision for one request, and its outcome. `ts`: its end, in seconds since the epoch."""

    gateway: str
    candidates: tuple[CandidateDocument, ...] = ()  # type: ignore[assignment]  # packed in files only
    attempts: tuple[AttemptDocument, ...] = ()


@dataclass(frozen=True, slots=True)
class Decisions:
    """The newest records of one request id, oldest first; clients may reuse an id."""

    decisions: tuple[DecisionDocument, ...]
    damaged: int
    """Stretches of files that were unreadable."""


class UsageRow(msgspec.Struct, frozen=True):
    """The usage of a model by a tenant on a day (UTC) with one outcome: `ok`, `cancelled`, or who is to blame."""

    day: str
    tenant: str
    model: str
    outcome: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    estimated: int
    """Requests whose tokens were counted by the gateway itself."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage counted by all gateways, by day."""

    rows: tuple[UsageRow, ...]


Line = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
"""A line as in the log."""


@dataclass(frozen=True, slots=True)
class AuditTail:
    """The newest lines of all chains, by time."""

    chains: tuple[str, ...]
    lines: tuple[Line, ...]
    cut: bool
    """Whether requested lines were omitted because the response would be too long."""


@dataclass(frozen=True, slots=True)
class FlawDocument:
    """Damage. `line` counts from 1 in its file; 0: the end of the chain."""

    kind: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class FileDocument:
    """The result for a file of the log. Times: seconds since the epoch; null: no line could be read."""

    name: str
    lines: int
    first: float | None
    last: float | None
    flaws: tuple[FlawDocument, ...]
    flaws_more: int
    """Flaws that are not listed."""
    unfinished_bytes: int
    """Bytes at the end of the newest file that have no seal yet."""


@dataclass(frozen=True, slots=True)
class ChainDocument:
    """The result for the log of one gateway. `flaws`: those that belong to no file."""

    ok: bool
    chain: str
    head: Head | None
    files: tuple[FileDocument, ...]
    flaws: tuple[FlawDocument, ...]
    gaps: tuple[AuditLine, ...]
    """Lost or late-sealed lines, as recorded in the log itself."""


@dataclass(frozen=True, slots=True)
class AuditVerified:
    """Whether nothing was changed or removed."""

    ok: bool
    chains: tuple[ChainDocument, ...]


class Records(Protocol):
    """Reads the records of the gateways on this machine. Every method blocks, and raises OSError."""

    def decisions(self, request_id: str, still: Still) -> Decisions:
        """How a request was routed; empty: there is no record of it."""

    def usage(self, wanted: UsageRequest, still: Still) -> Usage:
        """The usage by day, tenant and model."""

    def tail(self, last: int, bytes_max: int | None, still: Still) -> AuditTail:
        """The newest lines of the audit log, as many as fit in `bytes_max`; None: unlimited."""

    def verify(self, archived: bool, still: Still) -> AuditVerified:
        """Verify the whole audit log. `archived`: its oldest files, or whole folders, were moved."""
