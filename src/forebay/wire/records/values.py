"""Records about requests: decisions, audit lines, and the head of an audit chain. Values only."""

from enum import StrEnum
from typing import Final

import msgspec

NOTHING: Final = "0" * 64
"""The hash that the first line of a chain refers to."""
NO_CANDIDATES: Final = msgspec.Raw(b"\x90")
"""An empty array of MessagePack."""


class Candidate(msgspec.Struct, array_like=True, gc=False):
    """A replica that was considered, and the terms of its score in seconds, 0 where the policy has no such term."""

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
    """One attempt on a replica: why it was chosen, its outcome (`ok` or a reason), and its duration."""

    replica: str
    why: str
    outcome: str
    seconds: float


class Decision(msgspec.Struct, array_like=True, tag=1, gc=False):
    """The routing decision for one request, and its outcome. `ts`: its end, in seconds since the epoch.

    Fields may be added at the end, with a default: then old files stay readable.
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
    candidates: msgspec.Raw = NO_CANDIDATES
    """See `packed`."""
    others: int = 0
    """Candidates that are not listed."""
    chosen: str = ""
    """The replica that responded; empty if none was reached."""
    attempts: tuple[Attempt, ...] = ()
    queued_s: float = 0.0
    """Total time queued, before each attempt and after the last one."""
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    estimated: bool = False
    """The token counts are the gateway's own, for example of a cancelled stream: of the output, and of the prompt too
    where no worker has reported its length."""
    resumed: int = 0
    """How often the stream was resumed on another replica."""
    report_age_s: float = 0.0
    """Age of the chosen replica's load report when it was chosen."""
    asked: str = ""
    """The model name in the request, if it differs from the one that served it, or none did."""
    hit: str = ""
    """How it is known that the chosen replica holds part of the prompt, a `core.routing.Source`."""
    band: str = ""
    """The priority band it had at the end; empty if it was rejected before it got one."""
    deadline_s: float = 0.0
    """How long it might wait, by the client's deadline or the model's objective; 0: for `queue_timeout_s`."""
    dispatch: str = ""
    """Why it was dispatched to that model, if that is not simply the one asked for."""


class Event(StrEnum):
    """The type of an audit line."""

    REQUEST = "request"
    GAP = "gap"
    """Lines were lost because they could not be written: how many, and why."""
    BROKEN = "broken"
    """The gateway started and could not verify the end of the chain."""
    SKIPPED = "skipped"
    """Requests without a valid key were counted, not written: how many, and why."""
    PRUNED = "pruned"
    """The gateway removed files up to the line `pruned_seq`, as configured."""
    LATE = "late"
    """Lines before it had no seal when the gateway started, and are sealed with it: how many, and why."""
    KILLED = "killed"
    """The previous gateway had not closed its log: its last requests may be missing."""
    WITNESS = "witness"
    """The chain `other` ended with line `other_seq` and the hash `other_hash` when this gateway read it."""
    SEAL = "seal"
    """Seals the `lines` before it, the last of which has number `seq`; `prev` is the hash of the previous seal."""


class AuditLine(msgspec.Struct, gc=False, omit_defaults=True):
    """Who called which model when, from where, with what outcome; or an event of the log itself.

    Defaults are omitted from the line. A request's line includes everything in its access log line.
    """

    seq: int
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
    asked: str = ""
    """The model name in the request, if it differs from the one that served it, or none did."""
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
    """The body of the request, if enabled in the cluster file."""
    lines: int = 0
    why: str = ""
    pruned_seq: int = 0
    pruned_hash: str = ""
    other: str = ""
    other_seq: int = 0
    other_hash: str = ""
    prev: str = ""
    chain: str = ""


class Who(msgspec.Struct, gc=False, omit_defaults=True):
    """What the audit line of a request has besides its access log line and its number; see `AuditLine`."""

    tenant: str = ""
    key: str = ""
    client: str = ""
    revision: str = ""
    estimated: bool = False
    prompt: str = ""


class Head(msgspec.Struct, frozen=True):
    """The end of a chain: the number of its last line, and the hash of the seal for it."""

    seq: int = 0
    hash: str = NOTHING
