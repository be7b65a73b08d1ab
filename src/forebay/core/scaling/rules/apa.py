"""AIBrix' pod autoscaler (APA) on a per-replica metric, with its defaults.

Source: vllm-project/aibrix, pkg/controller/podautoscaler (the APA algorithm: two tolerances, two rates). It uses the
mean of a window; only the tolerance delays scaling down.
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
    """Its state."""

    samples: Samples = ()


def wanted(use: float, target: float, ready: int, current: int) -> int:
    """For `use` per replica: ⌈n·r⌉ for n ready replicas, with r = use / target, bounded by the rates.

    Within the tolerances nothing changes: `current`, including starting replicas.
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
    """The recommendation; `value` is the mean over ready replicas in the last `since_s` seconds."""
    samples = added(state.samples, Sample(now, since_s, value), WINDOW_S)
    return wanted(mean(samples, now, WINDOW_S), target, ready, current), State(samples)
