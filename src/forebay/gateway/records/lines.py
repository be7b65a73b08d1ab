"""What the access log says. Values only."""

import msgspec


class Line(msgspec.Struct, gc=False, omit_defaults=True):
    """What is written of one request. `ts` is seconds since the epoch."""

    event: str
    ts: float
    request_id: str
    path: str
    """The endpoint, without a query: keys are sent in queries too."""
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
    """The name in the request, if it is not that of the model that served it, or if none did."""


class Dropped(msgspec.Struct):
    """Says how many lines are missing."""

    event: str
    ts: float
    lines: int
