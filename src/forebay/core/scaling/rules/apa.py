"""AIBrix' pod autoscaler (APA) on a figure of each replica, with its defaults.

Source: vllm-project/aibrix, pkg/controller/podautoscaler (the APA algorithm: two tolerances, two rates). It looks at
the mean of a window; nothing holds a smaller number back but the tolerance.
"""

import math
from dataclasses import dataclass
from typing import Final

from forebay.core.scaling.rules.window import Sample, Samples, added, mean

WINDOW_S: Final = 60.0
UP_TOLERANCE: Final = 0.1
DOWN_TOLERANCE: Final = 0.2
UP_RATE: Final = 2.0
DOWN_RATE: Final = 2.0


@dataclass(frozen=True, slots=True)
class State:
    """What it remembers."""

    samples: Samples = ()


def wanted(use: float, target: float, ready: int, current: int) -> int:
    """For `use` per replica: ⌈n·r⌉ of the n that are ready, with r = use / target, bounded by the rates.

    Within the tolerances nothing changes: `current`, with those that are starting.
    """
    ratio = use / target
    if ratio > 1 + UP_TOLERANCE:
        return min(math.ceil(ready * ratio), math.ceil(UP_RATE * ready))
    if ratio < 1 - DOWN_TOLERANCE:
        return max(math.ceil(ready * ratio), math.floor(ready / DOWN_RATE))
    return current


def step(
    state: State, *, value: float, target: float, since_s: float, ready: int, current: int, now: float
) -> tuple[int, State]:
    """How many it wants; `value` is what ready replicas have on their mean in the last `since_s` seconds."""
    samples = added(state.samples, Sample(now, since_s, value), WINDOW_S)
    return wanted(mean(samples, now, WINDOW_S), target, ready, current), State(samples)
