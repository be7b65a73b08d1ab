"""Sliding window means of a metric, used by several of the formulas."""

from typing import NamedTuple


class Sample(NamedTuple):
    """A mean over the `since_s` seconds before `at`."""

    at: float
    since_s: float
    value: float


Samples = tuple[Sample, ...]


def added(samples: Samples, sample: Sample, window_s: float) -> Samples:
    """The samples with one more, without those that end before the window."""
    oldest = sample.at - window_s
    return (*[each for each in samples if each.at > oldest], sample)


def mean(samples: Samples, now: float, window_s: float) -> float:
    """Time-weighted mean over the last `window_s` seconds; 0 without samples."""
    oldest = now - window_s
    total = seconds = 0.0
    for at, since_s, value in samples:
        inside_s = min(since_s, at - oldest)
        if inside_s > 0:
            total += value * inside_s
            seconds += inside_s
    return total / seconds if seconds else 0.0
