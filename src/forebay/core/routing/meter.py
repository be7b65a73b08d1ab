"""A replica's queued prefill work, its learned speed, and how far cache predictions for it can be trusted."""

import math
from collections import deque
from typing import Final

from forebay.core.routing.speed import SAMPLES_MIN, Line

KV_SHARE_MAX: Final = 0.99
TRUST_STEP: Final = 0.1
"""Weight of a new sample of how much of a predicted hit was cached."""
DECODE_TOKENS_MIN: Final = 8
"""Shorter responses say little about the time per token."""
SECONDS_MIN: Final = 1e-6
LEAST_SHARE: Final = 0.25
"""As a share of the typical work: a step takes its time even for the shortest prompt."""
PACES_MAX: Final = 32
"""Most times per token that are kept until they are evaluated."""
NAME_PRIME: Final = (1 << 61) - 1


class Meter:
    """One generation of a replica. `handicap` (at least 1), `strained` and `asked_at` are set by the caller."""

    __slots__ = (
        "_decode",
        "_gateways",
        "_prefill",
        "_reported",
        "_since",
        "_unprefilled",
        "_unstreamed",
        "asked_at",
        "burden",
        "decode_slope_s",
        "handicap",
        "kv_share",
        "mask",
        "name",
        "paces_s",
        "prefill_tokens_per_s",
        "queue_tokens",
        "reports",
        "strained",
        "trust",
    )

    def __init__(self, id: str, mask: int) -> None:
        self.name = int.from_bytes(id.encode(), "big") % NAME_PRIME
        """The slot as a number that is the same in every process."""
        self.mask = mask
        """Its bit in the prefix index."""
        self.handicap = 1.0
        """1 in normal service."""
        self.burden = 1.0
        """Cost of a request relative to a replica of full throughput: 1 / weight."""
        self.strained = False
        """Requests queue in its engine because it is full, so it may be worth waiting for."""
        self.kv_share = 0.0
        """Share of the KV memory held by requests, 0..0.99; merely cached blocks count as free."""
        self.trust = 1.0
        """Actually cached tokens per token that the prefix index predicted, 0..1."""
        self.prefill_tokens_per_s = 0.0
        """Learned; 0 if unknown."""
        self.decode_slope_s = 0.0
        """How much each running request adds to the time per token, seconds; 0 if unknown."""
        self.queue_tokens = 0
        """Queued prompt tokens: its last report, and what was sent since."""
        self.paces_s: deque[float] = deque(maxlen=PACES_MAX)
        """Recent times per token, seconds; the evaluation takes them from here."""
        self.reports = 0
        """Number of its load reports."""
        self.asked_at = 0
        """When it last got a request or was doubted, as a count of the model's routed requests."""
        self._reported: int | None = None
        """Queued prompt tokens by its last report."""
        self._gateways = 1
        self._unprefilled = 0
        """Prompt tokens that this gateway has sent and that are not known to be prefilled."""
        self._since = 0
        """Those of them sent since the last report."""
        self._prefill = Line(1.0)
        """Seconds until the first token over the tokens prefilled in that time."""
        self._decode = Line(0.0)
        """Seconds per output token over the number of running requests."""
        self._unstreamed: deque[Charge] = deque()
        """Charges whose first token is not observed, in order of sending."""

    def report(self, queue_tokens: int | None, kv_share: float, gateways: int) -> None:
        """Apply its load report, which `gateways` gateways receive alike.

        `queue_tokens` is None if the last report is too old or lacks it: then only what this gateway sent counts.
        """
        self.reports += 1
        self.kv_share = min(max(0.0, kv_share), KV_SHARE_MAX)
        self._reported = queue_tokens
        self._gateways = gateways
        self._since = 0
        self._fuse()

    def charge(self, tokens: int, hit_tokens: int, now: float) -> "Charge":
        """A request is sent there. `tokens` of its prompt are expected to be uncached, given the trust in the index.

        `hit_tokens` is the index's own prediction.
        """
        charge = Charge(self, tokens, hit_tokens, now)
        self._unprefilled += tokens
        self._since += tokens
        self._fuse()
        return charge

    def release(self, charge: "Charge") -> None:
        """The charge's prompt is no longer queued."""
        self._unprefilled -= charge.tokens
        if charge.report == self.reports:
            self._since -= charge.tokens
        self._fuse()

    def weigh(self, weight: float) -> None:
        """Set its relative throughput, above 0, and rescale what was learned before."""
        change, self.burden = 1.0 / (weight * self.burden), 1.0 / weight
        if change != 1.0:
            self._rescale(change, change)

    def doubt(self, tokens_per_s: float, slope_s: float) -> None:
        """It has had no requests for long: if it measured slower than these typical values, keep only the square root
        of that factor."""
        speed, slope = self.prefill_tokens_per_s, self.decode_slope_s
        prefill = math.sqrt(speed / tokens_per_s) if 0.0 < speed < tokens_per_s else 1.0
        self._rescale(prefill, math.sqrt(slope_s / slope) if slope > slope_s else 1.0)

    def watch(self, charge: "Charge") -> None:
        """The response is not streamed, so its first token is not observed: `settle` will release the charge."""
        self._unstreamed.append(charge)

    def settle(self, now: float, tokens_per_s: float) -> None:
        """Release the watched charges whose prompts must be prefilled by now, at this speed."""
        charges = self._unstreamed
        while charges:
            first = charges[0]
            if first.queued and now - first.sent_at < (first.ahead_tokens + first.tokens) / tokens_per_s:
                return
            charges.popleft().release()

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """`tokens`, the request's own and those queued ahead of it, were prefilled in `seconds` until its first
        token."""
        line = self._prefill
        line.add(max(1, tokens), max(seconds, SECONDS_MIN))
        if line.samples >= SAMPLES_MIN:
            self.prefill_tokens_per_s = 1 / line.slope()

    def learn_decode(self, running: float, tpot_s: float) -> None:
        """A request got a token every `tpot_s` while `running` requests ran."""
        self.paces_s.append(tpot_s)
        line = self._decode
        line.add(max(1.0, running), max(tpot_s, SECONDS_MIN))
        if line.samples >= SAMPLES_MIN:
            self.decode_slope_s = line.slope()

    def pace_s(self, running: float) -> float:
        """Time per token of each request while `running` requests run, seconds; 0 if unknown."""
        line = self._decode
        return line.at(max(1.0, running)) if line.samples >= SAMPLES_MIN else 0.0

    def learn_trust(self, hit_tokens: int, cached_tokens: int) -> None:
        """The cache held `cached_tokens` where `hit_tokens` were predicted."""
        if hit_tokens > 0:
            self.trust += TRUST_STEP * (min(1.0, cached_tokens / hit_tokens) - self.trust)

    def _rescale(self, prefill: float, decode: float) -> None:
        """Scale the learned times by these factors."""
        self._prefill.scale(prefill)
        self._decode.scale(decode)
        self.prefill_tokens_per_s /= prefill
        self.decode_slope_s *= decode

    def _fuse(self) -> None:
        """Combine the last report with what was sent since, by all gateways if they send alike."""
        queue = self._unprefilled
        if self._reported is not None:
            queue = max(queue, self._reported + self._gateways * self._since)
        self.queue_tokens = queue


class Charge:
    """The work that one attempt adds to its replica, from routing on; removed once, however it ends."""

    __slots__ = (
        "ahead_tokens",
        "first_at",
        "hit_tokens",
        "meter",
        "queued",
        "report",
        "running",
        "sent_at",
        "tokens",
    )

    def __init__(self, meter: Meter, tokens: int, hit_tokens: int, now: float) -> None:
        self.meter = meter
        self.tokens = tokens
        """Prompt tokens expected to be uncached."""
        self.hit_tokens = hit_tokens
        """Prompt tokens that the prefix index predicted to be cached."""
        self.sent_at = now
        self.ahead_tokens = meter.queue_tokens
        """Prompt tokens queued at the replica before it."""
        self.report = meter.reports
        """Number of the replica's last load report when it was sent."""
        self.queued = True
        """Whether its prompt still counts as queued."""
        self.first_at: float | None = None
        """When its first token arrived; None: not observed."""
        self.running = 0
        """Requests at the replica at that time."""

    def first_token(self, now: float, running: int) -> None:
        """Its first token arrived while `running` requests were at the replica."""
        self.first_at = now
        self.running = running
        self.release()

    def normalised_ttft(self, seconds: float, usual_tokens: float) -> float:
        """The time to first token normalised to the typical amount of work.

        Replicas are compared by this, so that one that gets long or uncached prompts does not count as slow.
        """
        return seconds * usual_tokens / max(self.ahead_tokens + self.tokens, LEAST_SHARE * usual_tokens)

    def release(self) -> None:
        """Its prompt is no longer queued, or it has ended. Further calls have no effect."""
        if self.queued:
            self.queued = False
            self.meter.release(self)

    def done(
        self, now: float, running: int, prompt_tokens: int, cached_tokens: int | None, output_tokens: int
    ) -> None:
        """It was answered completely: learn from the replica's token counts. `cached_tokens` None: not reported."""
        self.release()
        meter = self.meter
        uncached = self.tokens
        if cached_tokens is not None:
            uncached = prompt_tokens - cached_tokens
            meter.learn_trust(min(self.hit_tokens, prompt_tokens), cached_tokens)
        if self.first_at is None:
            return
        meter.learn_prefill(uncached + self.ahead_tokens, self.first_at - self.sent_at)
        if output_tokens >= DECODE_TOKENS_MIN:
            pace = (now - self.first_at) / (output_tokens - 1)
            meter.learn_decode((self.running + running) / 2, pace)
