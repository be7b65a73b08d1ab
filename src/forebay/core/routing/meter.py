"""The work that waits at a replica, its speed, and how far predictions about its cache can be trusted."""

import math
from collections import deque
from typing import Final

from forebay.core.routing.speed import SAMPLES_MIN, Line

KV_SHARE_MAX: Final = 0.99
TRUST_STEP: Final = 0.1
DECODE_TOKENS_MIN: Final = 8
"""Shorter answers say little about the pace."""
SECONDS_MIN: Final = 1e-6
LEAST_SHARE: Final = 0.25
"""Of the usual work: a step takes its time even for the shortest prompt."""
PACES_MAX: Final = 32
"""Most paces that are kept until somebody judges them."""
NAME_PRIME: Final = (1 << 61) - 1


class Meter:
    """One start of one replica. `handicap`, at least 1, `strained` and `asked_at` are for others to set."""

    __slots__ = (
        "_blind",
        "_decode",
        "_gateways",
        "_prefill",
        "_reported",
        "_since",
        "_unprefilled",
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
        """What a request there counts, against one at a replica that can do its usual work: 1 by its weight."""
        self.strained = False
        """Requests wait in its engine for want of room: when it is full it is worth a wait."""
        self.kv_share = 0.0
        """Share of the KV memory that requests hold, 0..0.99; what is only cached counts as free."""
        self.trust = 1.0
        """Tokens that its cache held per token that the prefix index said it would, 0..1."""
        self.prefill_tokens_per_s = 0.0
        """Learned; 0 if unknown."""
        self.decode_slope_s = 0.0
        """By how much each running request slows the others' next token; 0 if unknown."""
        self.queue_tokens = 0
        """Prompt tokens that wait for their turn, by its own word and by what was sent since."""
        self.paces_s: deque[float] = deque(maxlen=PACES_MAX)
        """Seconds per token of late, for whoever judges them to take."""
        self.reports = 0
        self.asked_at = 0
        """When it was last asked, or doubted, in requests to the replicas of its model."""
        self._reported: int | None = None
        self._gateways = 1
        self._unprefilled = 0
        self._since = 0
        self._prefill = Line(1.0)
        self._decode = Line(0.0)
        self._blind: deque[Charge] = deque()

    def report(self, queue_tokens: int | None, kv_share: float, gateways: int) -> None:
        """Take over its load report, of which `gateways` in all get the same.

        `queue_tokens` is None while the last one is too old or says nothing: then only what this gateway sent counts.
        """
        self.reports += 1
        self.kv_share = min(max(0.0, kv_share), KV_SHARE_MAX)
        self._reported = queue_tokens
        self._gateways = gateways
        self._since = 0
        self._fuse()

    def charge(self, tokens: int, hit_tokens: int, now: float) -> "Charge":
        """A request is sent there. `tokens` of its prompt are new to it, as far as the index is trusted.

        The index said that it holds `hit_tokens`.
        """
        charge = Charge(self, tokens, hit_tokens, now)
        self._unprefilled += tokens
        self._since += tokens
        self._fuse()
        return charge

    def release(self, charge: "Charge") -> None:
        """Its prompt waits no more."""
        self._unprefilled -= charge.tokens
        if charge.report == self.reports:
            self._since -= charge.tokens
        self._fuse()

    def weigh(self, weight: float) -> None:
        """Take over how much of the usual work it can do, above 0. What was learned is of the time before."""
        change, self.burden = 1.0 / (weight * self.burden), 1.0 / weight
        if change != 1.0:
            self._rescale(change, change)

    def doubt(self, tokens_per_s: float, slope_s: float) -> None:
        """Nobody has asked it for long: if it is taken for slower than this, halve by how many times."""
        speed, slope = self.prefill_tokens_per_s, self.decode_slope_s
        prefill = math.sqrt(speed / tokens_per_s) if 0.0 < speed < tokens_per_s else 1.0
        self._rescale(prefill, math.sqrt(slope_s / slope) if slope > slope_s else 1.0)

    def watch(self, charge: "Charge") -> None:
        """Its first token will not be seen, because the answer comes as a whole: `settle` releases it in time."""
        self._blind.append(charge)

    def settle(self, now: float, tokens_per_s: float) -> None:
        """Release the watched charges whose prompts must be done by now, at this speed."""
        blind = self._blind
        while blind and (
            not blind[0].waits or now - blind[0].sent_at >= (blind[0].ahead_tokens + blind[0].tokens) / tokens_per_s
        ):
            blind.popleft().release()

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """This many tokens, its own and those ahead of it, were done when the first token of a request came."""
        line = self._prefill
        line.add(max(1, tokens), max(seconds, SECONDS_MIN))
        if line.samples >= SAMPLES_MIN:
            self.prefill_tokens_per_s = 1 / line.slope()

    def learn_decode(self, running: float, tpot_s: float) -> None:
        """A request got a token every `tpot_s` while this many ran."""
        self.paces_s.append(tpot_s)
        line = self._decode
        line.add(max(1.0, running), max(tpot_s, SECONDS_MIN))
        if line.samples >= SAMPLES_MIN:
            self.decode_slope_s = line.slope()

    def pace_s(self, running: float) -> float:
        """Seconds between two tokens of each request while so many run; 0 if unknown."""
        line = self._decode
        return line.at(max(1.0, running)) if line.samples >= SAMPLES_MIN else 0.0

    def learn_trust(self, hit_tokens: int, cached_tokens: int) -> None:
        """The cache held `cached_tokens` where `hit_tokens` were predicted."""
        if hit_tokens > 0:
            self.trust += TRUST_STEP * (min(1.0, cached_tokens / hit_tokens) - self.trust)

    def _rescale(self, prefill: float, decode: float) -> None:
        """Take what was learned for so many times as slow."""
        self._prefill.scale(prefill)
        self._decode.scale(decode)
        self.prefill_tokens_per_s /= prefill
        self.decode_slope_s *= decode

    def _fuse(self) -> None:
        queue = self._unprefilled
        if self._reported is not None:
            queue = max(queue, self._reported + self._gateways * self._since)
        self.queue_tokens = queue


class Charge:
    """What one attempt weighs on its replica, from the choice on; taken off once, however it ends."""

    __slots__ = (
        "ahead_tokens",
        "first_at",
        "hit_tokens",
        "meter",
        "report",
        "running",
        "sent_at",
        "tokens",
        "waits",
    )

    def __init__(self, meter: Meter, tokens: int, hit_tokens: int, now: float) -> None:
        self.meter = meter
        self.tokens = tokens
        self.hit_tokens = hit_tokens
        self.sent_at = now
        self.ahead_tokens = meter.queue_tokens
        self.report = meter.reports
        self.waits = True
        self.first_at: float | None = None
        self.running = 0

    def first_token(self, now: float, running: int) -> None:
        """Its first token has come while this many requests were at the replica."""
        self.first_at = now
        self.running = running
        self.release()

    def evened(self, seconds: float, usual_tokens: float) -> float:
        """How late its first token would have been, had there been the usual work before it.

        Replicas are compared by this: who gets the long prompts, or those that no cache holds, is not slow.
        """
        return seconds * usual_tokens / max(self.ahead_tokens + self.tokens, LEAST_SHARE * usual_tokens)

    def release(self) -> None:
        """Its prompt waits no more, or it has ended. Further calls do nothing."""
        if self.waits:
            self.waits = False
            self.meter.release(self)

    def done(
        self, now: float, running: int, prompt_tokens: int, cached_tokens: int | None, output_tokens: int
    ) -> None:
        """It was answered completely: learn from what the replica counted. None teaches nothing about its cache."""
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
