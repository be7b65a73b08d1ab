"""What is written down of requests: decisions, audit lines, and the end of a chain of these. Values only."""

from enum import StrEnum
from typing import Final

import msgspec

NOTHING: Final = "0" * 64
"""What the first line of a chain follows."""
NO_CANDIDATES: Final = msgspec.Raw(b"\x90")
"""An empty array of MessagePack."""


class Candidate(msgspec.Struct, array_like=True, gc=False):
    """A replica that was looked at, and every term of its score: seconds, 0 where the policy has no such term."""

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
    """One try on a replica: why it was chosen, how that ended (`ok` or a reason), how long it took."""

    replica: str
    why: str
    outcome: str
    seconds: float


class Decision(msgspec.Struct, array_like=True, tag=1, gc=False):
    """What was decided about one request, and what came of it. `ts`: its end, seconds since the epoch.

    Fields may be added at the end, with a default: then old files can still be read.
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
    """The replica that answered; empty if none was reached."""
    attempts: tuple[Attempt, ...] = ()
    queued_s: float = 0.0
    """All its waits together, before each attempt and after the last one."""
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    estimated: bool = False
    """The tokens are the gateway's own count, as of a cancelled stream: of the answer, and of the prompt too where no
    worker has told how long it is."""
    resumed: int = 0
    """How often the stream went on elsewhere."""
    report_age_s: float = 0.0
    """Age of the chosen replica's load report when it was chosen."""
    asked: str = ""
    """The model's name in the request, if another one served it, or none."""
    hit: str = ""
    """How it is known that the chosen replica holds a part of the prompt, a `core.routing.Source`."""
    band: str = ""
    """How urgent it was taken for in the end; empty if it was never that far."""
    deadline_s: float = 0.0
    """How long it might wait, by its client or by the promise of its model; 0: for `queue_timeout_s`."""
    dispatch: str = ""
    """Why it went to that model, if that is not simply the one asked for."""


class Event(StrEnum):
    """What an audit line is about."""

    REQUEST = "request"
    GAP = "gap"
    """Lines were lost because they could not be written: how many, and why."""
    BROKEN = "broken"
    """The gateway came up and could not tell whether the chain still had its end."""
    SKIPPED = "skipped"
    """Requests without a good key were counted, not written: how many, and why."""
    PRUNED = "pruned"
    """Files up to the line `pruned_seq` were removed by the gateway, as it was told to."""
    LATE = "late"
    """Lines before it had no seal when the gateway came up, and are sealed with it: how many, and why."""
    KILLED = "killed"
    """The gateway before had not closed its log: requests of its last moments may be missing."""
    WITNESS = "witness"
    """The chain `other` ended with line `other_seq` and the hash `other_hash`, as this gateway has seen."""
    SEAL = "seal"
    """It seals `lines` before it, of which the last is number `seq`; `prev` is the hash of the seal before."""


class AuditLine(msgspec.Struct, gc=False, omit_defaults=True):
    """Which model was called, when, by whom, from where, with what outcome; or what is about the log itself.

    Defaults are left out of the line. That of a request holds all that the access log says of it, too.
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
    """The model's name in the request, if another one served it, or none."""
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
    """The body of the request, if the cluster file says so."""
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
    """What the audit log says of a request beyond its line of the access log and its number; see `AuditLine`."""

    tenant: str = ""
    key: str = ""
    client: str = ""
    revision: str = ""
    estimated: bool = False
    prompt: str = ""


class Head(msgspec.Struct, frozen=True):
    """The end of a chain: number of its last line, and hash of the seal for it."""

    seq: int = 0
    hash: str = NOTHING
