"""How much traffic a throttled GPU gets: in proportion to its clock, without following every flicker of it."""

from collections.abc import Sequence
from typing import Final

from forebay.core.health.values import DeviceReading, Throttle

WEIGHT_MIN: Final = 0.1
"""However slow, it gets some requests: otherwise nobody would notice that it is fast again."""
SLOW_BELOW: Final = 0.9
"""A mean clock ratio below this counts as slow …"""
FAST_ABOVE: Final = 0.95
"""… and one above this no more."""
STEP: Final = 0.05
"""Smaller changes of the weight are not worth a new snapshot."""
HALF_S: Final = 10.0
"""After so long an old clock counts half."""
GAP_S_MAX: Final = 60.0
"""What was measured before a longer silence counts no more."""


def clock_ratio(reading: DeviceReading) -> float | None:
    """The clock in shares of what it could be, 0..1: 1 where nothing holds it back. None: unknown.

    The cap of its power holds back every GPU that works hard: that is no fault of it.
    """
    if reading.throttles is None:
        return None
    if not set(reading.throttles) - {Throttle.POWER_CAP}:
        return 1.0
    if reading.clock_mhz is None or not reading.clock_max_mhz:
        return None
    return min(1.0, reading.clock_mhz / reading.clock_max_mhz)


def smoothed(mean: float, sample: float, gap_s: float) -> float:
    """The mean clock ratio after one more sample, `gap_s` after the one before."""
    if gap_s >= GAP_S_MAX:
        return sample
    kept: float = 0.5 ** (max(0.0, gap_s) / HALF_S)
    return mean * kept + sample * (1.0 - kept)


def weight(before: float, mean: float) -> float:
    """The weight that follows on `before` at this mean clock ratio."""
    if mean > FAST_ABOVE or (before >= 1.0 and mean >= SLOW_BELOW):
        return 1.0
    wanted = max(WEIGHT_MIN, round(mean / STEP) * STEP)
    return before if before < 1.0 and abs(mean - before) < STEP else round(min(wanted, 1.0 - STEP), 2)


def lightest(weights: Sequence[float]) -> float:
    """The weight of a replica on several devices: they work in step, so the slowest one decides. 1 without any."""
    return min(weights, default=1.0)
