"""What the replicas of one model have in common: how busy they are together, their usual speed, who holds what.

And what a usual request would find there, for scaling: the waits of `cpr`, and that for a place.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from forebay.core.prefix.index import PrefixIndex
from forebay.core.routing.meter import Charge, Meter
from forebay.core.routing.speed import Lengths
from forebay.core.routing.values import Ask, View

PREFILL_TOKENS_PER_S: Final = 2000.0
"""Assumed while no replica's speed is known."""
DECODE_SLOPE_S: Final = 0.0004
"""Assumed while no replica's is known: a large model on a data-centre GPU."""
SPREAD_MAX: Final = 8.0
"""No replica is believed to be slower than the usual one by more."""
UNASKED_MAX: Final = 32
"""Requests for each replica of the model after which one that got none of them is doubted to be slow. Who was slow
once, as just after a start, would else stay without any: a wrong belief would never be tested again."""
RHO_WINDOW_S: Final = 30.0
RHO_MAX: Final = 0.99
"""Bounds the price: unbounded, it would send everything to one owner of a prefix for ever."""
BETA: Final = 0.5
"""How much the delays of others count."""
WAIT_HALF_S: Final = 1.0
"""Mean queue wait at which the replicas count as half used, whatever the arrivals say."""


class Pricing:
    """One model in one gateway. `gateways` is how many live ones share the load."""

    __slots__ = (
        "_arriving",
        "_as_of",
        "_asked",
        "decode_slope_s",
        "gateways",
        "index",
        "prefill_tokens_per_s",
        "rho",
    )

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.gateways = 1
        self.rho = 0.0
        """Prompt work that arrives, in shares of what the replicas can do."""
        self.prefill_tokens_per_s = PREFILL_TOKENS_PER_S
        """Of the usual replica: the median of those known; of a pair the higher: the slow one is held against it."""
        self.decode_slope_s = DECODE_SLOPE_S
        self._arriving = 0.0
        self._as_of = 0.0
        self._asked = 0

    def refresh(self, meters: Sequence[Meter], now: float) -> None:
        """Look again at all live replicas; to be done a few times a second."""
        speeds, slopes = [m.prefill_tokens_per_s for m in meters], [m.decode_slope_s for m in meters]
        self.prefill_tokens_per_s = _median(speeds, high=True) or PREFILL_TOKENS_PER_S
        self.decode_slope_s = _median(slopes) or DECODE_SLOPE_S
        capacity = 0.0
        for meter in meters:
            if self._asked - meter.asked_at > UNASKED_MAX * len(meters):
                meter.asked_at = self._asked
                meter.doubt(self.prefill_tokens_per_s, self.decode_slope_s)
            speed = self.speed(meter)
            capacity += speed
            meter.settle(now, speed)
        self._fade(now)
        self.rho = self.gateways * self._arriving / (RHO_WINDOW_S * capacity) if capacity else 0.0

    def speed(self, meter: Meter) -> float:
        """Prompt tokens per second that a replica is believed to read."""
        usual = self.prefill_tokens_per_s
        return max(meter.prefill_tokens_per_s or usual, usual / SPREAD_MAX)

    def ttft_s(self, views: Sequence[View], lengths: Lengths, waiting: int, waiting_tokens: int) -> float | None:
        """What the first token of a usual prompt, of which nothing is cached, would take if it came now, seconds.

        A mean over `views`, the replicas that take requests; None while no speed of them is known. So many requests,
        with so many prompt tokens, wait in this gateway and go first.
        """
        if not any(view.meter.prefill_tokens_per_s for view in views):
            return None
        prompt, output = lengths.prompt_tokens, lengths.output_tokens
        there_s, places_per_s, tokens_per_s = 0.0, 0.0, 0.0
        for view in views:
            meter, speed = view.meter, self.speed(view.meter)
            there_s += (meter.queue_tokens + prompt) / speed
            places_per_s += max(1, view.room) / (prompt / speed + output * meter.pace_s(view.room))
            tokens_per_s += speed
        # who waits needs a place, which the answers under way have, and time to be read: what is scarcer counts
        here_s = self.gateways * max(waiting / places_per_s, waiting_tokens / tokens_per_s)
        return here_s + there_s / len(views)

    def tpot_s(self, views: Sequence[View]) -> float | None:
        """What each further token of a request would take if it came now, seconds.

        A mean over those of the replicas whose pace is known; None if there are none.
        """
        paces_s = [view.meter.pace_s(min(view.load + 1, view.room)) for view in views]
        known = [pace_s for pace_s in paces_s if pace_s]
        return fmean(known) if known else None

    def sent(self, meter: Meter, ask: Ask, hit_tokens: int, streams: bool, now: float) -> Charge:
        """A request was routed: charge its replica, and expect its prompt to be in that one's cache from now on."""
        tokens = max(1, ask.tokens - int(meter.trust * hit_tokens))
        self._fade(now)
        self._arriving += tokens
        self._asked += 1
        meter.asked_at = self._asked
        self.index.note(meter.mask, ask.blocks, now)
        charge = meter.charge(tokens, hit_tokens, now)
        if not streams:
            meter.watch(charge)
        return charge

    def price(self, wait_s: float, tokens_per_s: float) -> float:
        """Seconds that a prompt token costs others, where requests wait so long and replicas are so fast on average.

        A queue at utilisation rho passes a delay on rho/(1 - rho) times. What the token may push out of a cache is
        not priced: the first copies of a prefix that many requests share would look dear, and they pay off.
        """
        rho = min(RHO_MAX, max(self.rho, wait_s / (wait_s + WAIT_HALF_S)))
        return BETA * rho / (1.0 - rho) / tokens_per_s

    def _fade(self, now: float) -> None:
        self._arriving *= math.exp((self._as_of - now) / RHO_WINDOW_S)
        self._as_of = now


def _median(values: list[float], *, high: bool = False) -> float:
    """The median of those that are known, of an even number the lower or the `high`er one; 0 if none is."""
    known = sorted(value for value in values if value)
    return known[(len(known) - (not high)) // 2] if known else 0.0
