"""Counting what happens to requests: metrics by model, one access log line each."""

from typing import Final

from forebay.gateway.records.facts import Used
from forebay.obs.metrics import Counter, Metrics

Tokens = tuple[int, int, int | None]
"""Of the prompt, of the answer, and of the prompt out of a cache: None if the engine cannot say."""
OK = "ok"
CLIENT_CLOSED = "client_closed"
DIGITS_MAX: Final = 12
"""Nothing longer is a count of tokens."""
TEMPLATE_TOKENS_MAX: Final = 65_536
"""A prompt has no more tokens than bytes, but for those that the model's template adds: so many at most."""
UNTOLD: Final[Tokens] = (0, 0, None)
COMMA: Final = 0x2C
ZERO: Final = 0x30


class Account:
    """The metrics of one model, looked up once."""

    __slots__ = (
        "_metrics",
        "cached_tokens",
        "completion_tokens",
        "duration",
        "events",
        "model",
        "ok",
        "prompt_tokens",
        "queue_wait",
        "tpot",
        "ttft",
    )

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self.model = model
        self.ok = metrics.counter("requests_total", model, OK)
        self.duration = metrics.histogram("request_duration_seconds", model)
        self.ttft = metrics.histogram("ttft_seconds", model)
        self.tpot = metrics.histogram("tpot_seconds", model)
        self.prompt_tokens = metrics.counter("prompt_tokens_total", model)
        self.completion_tokens = metrics.counter("completion_tokens_total", model)
        self.cached_tokens = metrics.counter("cached_tokens_total", model)
        self.events = metrics.counter("stream_events_total", model)
        self.queue_wait = metrics.histogram("queue_wait_seconds", model)

    def answered(self, duration_s: float) -> None:
        """A request ended well."""
        self.ok.value += 1
        self.duration.observe(duration_s)

    def spent(self, used: Used) -> None:
        """What a request has used, however it ended."""
        self.prompt_tokens.value += used.prompt
        self.completion_tokens.value += used.completion
        self.cached_tokens.value += used.cached

    def streamed(self, ttft_s: float, rest_s: float, tokens: int) -> None:
        """A stream ended, well or not, that had at least one event."""
        self.ttft.observe(ttft_s)
        if tokens > 1:
            self.tpot.observe(rest_s / (tokens - 1))

    def failed(self, code: str) -> Counter:
        """Requests that ended with this code."""
        return self._metrics.counter("requests_total", self.model, code)

    def resumed(self, reason: str) -> Counter:
        """Streams that another replica went on with."""
        return self._metrics.counter("resumes_total", self.model, reason)

    def fell_back(self, trouble: str) -> Counter:
        """Requests that another model was to serve."""
        return self._metrics.counter("fallbacks_total", self.model, trouble)

    def mirrored(self, outcome: str) -> Counter:
        """Copies for a revision that is to serve, by what became of them."""
        return self._metrics.counter("mirrored_requests_total", self.model, outcome)

    def preempted(self, band: str) -> Counter:
        """Attempts of a band that gave way to more urgent requests."""
        return self._metrics.counter("preemptions_total", self.model, band)

    def hedged(self, outcome: str) -> Counter:
        """Second attempts of late requests that won, or lost."""
        return self._metrics.counter("hedges_total", self.model, outcome)

    def retried(self, reason: str) -> Counter:
        """Attempts that were repeated elsewhere."""
        return self._metrics.counter("retries_total", self.model, reason)


def usage(value: bytes) -> Tokens:
    """Prompt, completion and cached tokens out of `x-forebay-usage`; nothing is known if it makes no sense."""
    told: list[int] = []
    number = digits = 0
    for byte in value + b",":  # by hand: `split` and `int` take ten times as long, for every answer
        if byte == COMMA:
            told.append(number if digits else -1)
            number = digits = 0
        elif ZERO <= byte < ZERO + 10 and digits < DIGITS_MAX:
            number = 10 * number + byte - ZERO
            digits += 1
        else:
            return UNTOLD
    if len(told) != 3 or told[0] < 0 or told[1] < 0:
        return UNTOLD
    return told[0], told[1], told[2] if told[2] >= 0 else None


def begun(told: Tokens, request_bytes: int) -> Tokens:
    """What a worker tells of a prompt when its answer begins, if that can be true of a request of this size."""
    prompt, _, cached = told
    if prompt > request_bytes + TEMPLATE_TOKENS_MAX:
        return UNTOLD
    return prompt, 0, min(cached or 0, prompt)
