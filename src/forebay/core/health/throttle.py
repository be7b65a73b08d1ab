"""The traffic weight of a throttled GPU: in proportion to its clock, smoothed."""

from collections.abc import Sequence
from typing import Final

from forebay.core.health.values import DeviceReading, Throttle

WEIGHT_MIN: Final = 0.1
"""It always gets some requests: otherwise its recovery would go unnoticed."""
SLOW_BELOW: Final = 0.9
"""A mean clock ratio below this counts as slow …"""
FAST_ABOVE: Final = 0.95
"""… and one above this as fast again."""
STEP: Final = 0.05
"""Smaller changes of the weight are not worth a new snapshot."""
HALF_S: Final = 10.0
"""Half-life of old clock samples."""
GAP_S_MAX: Final = 60.0
"""Samples before a longer gap are discarded."""


def clock_ratio(reading: DeviceReading) -> float | None:
    """The clock as a share of its maximum, 0..1; 1 if not throttled. None: unknown.

    The power cap is ignored: it limits every GPU under high load.
    """
    if reading.throttles is None:
        return None
    if not set(reading.throttles) - {Throttle.POWER_CAP}:
        return 1.0
    if reading.clock_mhz is None or not reading.clock_max_mhz:
        return None
    return min(1.0, reading.clock_mhz / reading.clock_max_mhz)


def smoothed(mean: float, sample: float, gap_s: float) -> float:
    """The mean clock ratio after another sample, `gap_s` after the previous one."""
    if gap_s >= GAP_S_MAX:
        return sample
    kept: float = 0.5 ** (max(0.0, gap_s) / HALF_S)
    return mean * kept + sample * (1.0 - kept)


def weight(before: float, mean: float) -> float:
    """The weight that follows `before` at this mean clock ratio."""
    if mean > FAST_ABOVE or (before >= 1.0 and mean >= SLOW_BELOW):
        return 1.0
    wanted = max(WEIGHT_MIN, round(mean / STEP) * STEP)
    return before if before < 1.0 and abs(mean - before) < STEP else round(min(wanted, 1.0 - STEP), 2)


def lightest(weights: Sequence[float]) -> float:
    """The weight of a replica on several devices: the slowest decides, as they work in lockstep. 1 without any."""
    return min(weights, default=1.0)
