"""Request metrics of one model, and the parsing of token counts."""

from typing import Final

from forebay.core.errors import OK
from forebay.gateway.records.facts import Used
from forebay.obs.metrics import Counter, Metrics

Tokens = tuple[int, int, int | None]
"""Prompt, completion and cached prompt tokens; the last is None if the engine cannot tell."""
DIGITS_MAX: Final = 12
"""Longer numbers are no token counts."""
TEMPLATE_TOKENS_MAX: Final = 65_536
"""A prompt has at most one token per byte, plus those of the model's chat template: at most this many."""
UNREPORTED: Final[Tokens] = (0, 0, None)
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
        """A request succeeded."""
        self.ok.value += 1
        self.duration.observe(duration_s)

    def spent(self, used: Used) -> None:
        """The tokens that a request used, however it ended."""
        self.prompt_tokens.value += used.prompt
        self.completion_tokens.value += used.completion
        self.cached_tokens.value += used.cached

    def streamed(self, ttft_s: float, rest_s: float, tokens: int) -> None:
        """A stream with at least one event ended, successfully or not."""
        self.ttft.observe(ttft_s)
        if tokens > 1:
            self.tpot.observe(rest_s / (tokens - 1))

    def failed(self, code: str) -> Counter:
        """Requests that ended with this error code."""
        return self._metrics.counter("requests_total", self.model, code)

    def resumed(self, reason: str) -> Counter:
        """Streams that another replica resumed."""
        return self._metrics.counter("resumes_total", self.model, reason)

    def fell_back(self, trouble: str) -> Counter:
        """Requests handed to another model."""
        return self._metrics.counter("fallbacks_total", self.model, trouble)

    def mirrored(self, outcome: str) -> Counter:
        """Mirrored copies sent to the canary, by outcome."""
        return self._metrics.counter("mirrored_requests_total", self.model, outcome)

    def preempted(self, band: str) -> Counter:
        """Attempts of a band that were preempted."""
        return self._metrics.counter("preemptions_total", self.model, band)

    def hedged(self, outcome: str) -> Counter:
        """Hedges, by outcome: `won` or `lost`."""
        return self._metrics.counter("hedges_total", self.model, outcome)

    def retried(self, reason: str) -> Counter:
        """Attempts that were retried elsewhere."""
        return self._metrics.counter("retries_total", self.model, reason)


def usage(value: bytes) -> Tokens:
    """Prompt, completion and cached tokens from `x-forebay-usage`; `UNREPORTED` if it is malformed."""
    counts: list[int] = []
    number = digits = 0
    for byte in value + b",":  # by hand: `split` and `int` take ten times as long, for every response
        if byte == COMMA:
            counts.append(number if digits else -1)
            number = digits = 0
        elif ZERO <= byte < ZERO + 10 and digits < DIGITS_MAX:
            number = 10 * number + byte - ZERO
            digits += 1
        else:
            return UNREPORTED
    if len(counts) != 3 or counts[0] < 0 or counts[1] < 0:
        return UNREPORTED
    return counts[0], counts[1], counts[2] if counts[2] >= 0 else None


def begun(reported: Tokens, request_bytes: int) -> Tokens:
    """The prompt counts that a worker reports when its response begins, if plausible for this request size."""
    prompt, _, cached = reported
    if prompt > request_bytes + TEMPLATE_TOKENS_MAX:
        return UNREPORTED
    return prompt, 0, min(cached or 0, prompt)
