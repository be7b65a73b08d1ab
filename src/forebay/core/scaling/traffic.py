"""Offered load: its current level, over short and long windows, and its slope.

Work is counted in prompt tokens, plus one per request: the cost of a request varies far less per token than per
request, and models without tokens are counted too. An output token counts as OUTPUT prompt tokens, as prompts are
processed many tokens at once.
"""

import math
from typing import Final, NamedTuple

from forebay.core.scaling.values import Reading

OUTPUT: Final = 4.0
"""The true ratio is 2 to 10, depending on the engine and its load. As long as this is closer to it than 1, a
replica's capacity hardly depends on the mix, so that a shift from long prompts to long responses is no surprise."""
SHORT_S: Final = 12.0
LEVEL_S: Final = 60.0
LONG_S: Final = 600.0
"""Time constants of exponentially weighted means."""
ANSWERS: Final = 500.0
"""Number of responses over which their mean length is taken."""
PEAK_PARTS: Final = 8
PEAK_S: Final = 120.0
"""Late responses are attributed to the highest load of this period, in which they began."""


class Traffic(NamedTuple):
    """Traffic of one model. Rates are work per second."""

    short: float = 0.0
    level: float = 0.0
    long: float = 0.0
    requests: float = 0.0
    """Requests per second, over LEVEL_S."""
    in_flight: float = 0.0
    """In replicas, over LEVEL_S."""
    output: float = 0.0
    """Mean response length, tokens."""
    answers: float = 0.0
    """Responses counted for it, at most ANSWERS."""
    seen_s: float = 0.0
    """How long there have been readings, at most LONG_S."""
    peaks: tuple[tuple[float, float], ...] = ()
    """Times, and the highest level per ready replica since, within PEAK_S."""

    def slope(self) -> float:
        """Slope of the level, work per second per second."""
        if self.seen_s < LONG_S / 2:
            return 0.0
        return (self.level - self.long) / (LONG_S - LEVEL_S)


def with_reading(traffic: Traffic, reading: Reading) -> Traffic:
    """The traffic updated with a reading."""
    since_s = reading.since_s
    output, answers = traffic.output, traffic.answers
    if reading.completions:
        answers = min(answers + reading.completions, ANSWERS)
        part = min(reading.completions / answers, 1.0)
        output += (reading.output_tokens / reading.completions - output) * part
    work, held = work_of(reading, output) / since_s, max(reading.in_flight - reading.waiting, 0.0)
    seen_s = min(traffic.seen_s + since_s, LONG_S)
    level = _mean(traffic.level, work, since_s, min(LEVEL_S, seen_s))
    return Traffic(
        short=_mean(traffic.short, work, since_s, min(SHORT_S, seen_s)),
        level=level,
        long=_mean(traffic.long, work, since_s, min(LONG_S, seen_s)),
        requests=_mean(traffic.requests, reading.arrivals / since_s, since_s, min(LEVEL_S, seen_s)),
        in_flight=_mean(traffic.in_flight, held, since_s, min(LEVEL_S, seen_s)),
        output=output,
        answers=answers,
        seen_s=seen_s,
        peaks=_peaks(traffic.peaks, reading.at, level / max(reading.ready, 1)),
    )


def work_of(reading: Reading, output: float) -> float:
    """Work of the arrived requests, if their responses have the mean length `output`."""
    return reading.prompt_tokens + reading.arrivals * (OUTPUT * output + 1.0)


def peak(traffic: Traffic) -> float:
    """The highest recent level per ready replica."""
    return max((value for _, value in traffic.peaks), default=0.0)


def _mean(old: float, new: float, since_s: float, over_s: float) -> float:
    return old + (new - old) * -math.expm1(-since_s / over_s) if over_s > since_s else new


def _peaks(peaks: tuple[tuple[float, float], ...], now: float, value: float) -> tuple[tuple[float, float], ...]:
    recent = [each for each in peaks if each[0] > now - PEAK_S]
    if recent and now - recent[-1][0] < PEAK_S / PEAK_PARTS:
        at, before = recent[-1]
        recent[-1] = (at, max(before, value))
    else:
        recent.append((now, value))
    return tuple(recent)
