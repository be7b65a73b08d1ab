"""State shared by the replicas of one model: utilisation, typical speed, and the prefix index.

Also the predicted latency of a typical request, for autoscaling: the waits of `cpr` plus that in the gateway's queue.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from forebay.core.prefix.index import PrefixIndex
from forebay.core.routing.meter import Charge, Meter
from forebay.core.routing.speed import Lengths
from forebay.core.routing.values import ReplicaView, RoutingRequest

PREFILL_TOKENS_PER_S: Final = 2000.0
"""Assumed while no replica's speed is known."""
DECODE_SLOPE_S: Final = 0.0004
"""Seconds per token and running request, assumed while no replica's is known: a large model on a data-centre GPU."""
SPREAD_MAX: Final = 8.0
"""No replica is believed to be slower than the typical one by more than this factor."""
UNASKED_MAX: Final = 32
"""After this many requests per replica, one that got none of them is probed again by doubting its measured slowness.
A replica that was slow once, as just after a start, would otherwise get no requests and the measurement would never
be corrected."""
RHO_WINDOW_S: Final = 30.0
"""Time constant of the mean arrival rate that utilisation is computed from."""
RHO_MAX: Final = 0.99
"""Bounds the price: unbounded, it would send everything to one owner of a prefix forever."""
BETA: Final = 0.5
"""Weight of the delays of others."""
WAIT_HALF_S: Final = 1.0
"""Mean queue wait at which utilisation counts as at least 0.5, whatever the arrival rate."""


class Pricing:
    """One model at one gateway. `gateways`: how many live ones share the load."""

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
        """Utilisation: arriving prefill work as a share of what the replicas can do."""
        self.prefill_tokens_per_s = PREFILL_TOKENS_PER_S
        """Median of the known speeds; of an even number the higher one, so that a slow replica stands out."""
        self.decode_slope_s = DECODE_SLOPE_S
        """Median of the known slopes: seconds per token that each running request adds."""
        self._arriving = 0.0
        """Uncached prompt tokens routed up to `_as_of`, decayed with `RHO_WINDOW_S`."""
        self._as_of = 0.0
        self._asked = 0
        """Number of requests routed."""

    def refresh(self, meters: Sequence[Meter], now: float) -> None:
        """Update from all live replicas; to be called a few times a second."""
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
        """The assumed prefill speed of a replica, prompt tokens per second."""
        usual = self.prefill_tokens_per_s
        return max(meter.prefill_tokens_per_s or usual, usual / SPREAD_MAX)

    def ttft_s(
        self, views: Sequence[ReplicaView], lengths: Lengths, waiting: int, waiting_tokens: int
    ) -> float | None:
        """Predicted time to first token of a typical, uncached prompt that arrives now, seconds.

        Mean over `views`, the replicas that accept requests; None while none of their speeds is known. `waiting`
        requests with `waiting_tokens` prompt tokens are queued ahead in this gateway.
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
        # a waiting request needs a slot, which running ones hold, and prefill time: the scarcer of the two counts
        here_s = self.gateways * max(waiting / places_per_s, waiting_tokens / tokens_per_s)
        return here_s + there_s / len(views)

    def tpot_s(self, views: Sequence[ReplicaView]) -> float | None:
        """Predicted time per output token of a request that arrives now, seconds.

        Mean over the replicas whose speed is known; None if there are none.
        """
        paces_s = [view.meter.pace_s(min(view.load + 1, view.room)) for view in views]
        known = [pace_s for pace_s in paces_s if pace_s]
        return fmean(known) if known else None

    def sent(self, meter: Meter, request: RoutingRequest, hit_tokens: int, streams: bool, now: float) -> Charge:
        """A request was routed: charge its replica, and expect its prompt in that one's prefix cache from now on."""
        tokens = max(1, request.tokens - int(meter.trust * hit_tokens))
        self._fade(now)
        self._arriving += tokens
        self._asked += 1
        meter.asked_at = self._asked
        self.index.note(meter.mask, request.blocks, now)
        charge = meter.charge(tokens, hit_tokens, now)
        if not streams:
            meter.watch(charge)
        return charge

    def price(self, wait_s: float, tokens_per_s: float) -> float:
        """The delay that a prompt token costs others, seconds, given the mean queue wait and mean speed of the
        replicas.

        A queue at utilisation rho passes a delay on rho/(1 - rho) times. Evictions that the token may cause are not
        priced: the first copies of a prefix shared by many requests would look expensive, although they pay off.
        """
        rho = min(RHO_MAX, max(self.rho, wait_s / (wait_s + WAIT_HALF_S)))
        return BETA * rho / (1.0 - rho) / tokens_per_s

    def _fade(self, now: float) -> None:
        self._arriving *= math.exp((self._as_of - now) / RHO_WINDOW_S)
        self._as_of = now


def _median(values: list[float], *, high: bool = False) -> float:
    """The median of the non-zero values, of an even number the lower or the `high`er one; 0 if there are none."""
    known = sorted(value for value in values if value)
    return known[(len(known) - (not high)) // 2] if known else 0.0
