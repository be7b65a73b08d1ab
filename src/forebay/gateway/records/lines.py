"""The lines of the access log. Values only."""

import msgspec


class Line(msgspec.Struct, gc=False, omit_defaults=True):
    """One request. `ts` is seconds since the epoch."""

    event: str
    ts: float
    request_id: str
    path: str
    """The endpoint, without the query: some clients put keys in queries."""
    model: str
    status: int
    code: str
    ms: int
    stream: bool = False
    replica: str = ""
    retries: int = 0
    ttft_ms: int = 0
    queued_ms: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    resumes: int = 0
    asked: str = ""
    """The model name in the request, if another model served it, or none did."""


class Dropped(msgspec.Struct):
    """How many lines were dropped."""

    event: str
    ts: float
    lines: int
