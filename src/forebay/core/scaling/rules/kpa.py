"""Knative's pod autoscaler on concurrency, with its defaults.

Source: knative/serving, pkg/autoscaler/scaling/autoscaler.go (Scale), and config/core/configmaps/autoscaler.yaml.
Its activator, which buffers bursts for a fleet without spare capacity, is the gateway's queue here.
"""

import math
from dataclasses import dataclass
from typing import Final

from forebay.core.scaling.rules.window import Sample, Samples, added, mean

STABLE_WINDOW_S: Final = 60.0
PANIC_WINDOW_S: Final = 6.0
"""`panic-window-percentage`: 10 % of the stable one."""
PANIC_THRESHOLD: Final = 2.0
UP_RATE: Final = 1000.0
DOWN_RATE: Final = 2.0
UTILIZATION: Final = 0.7
"""`container-concurrency-target-percentage`: target share of a replica's concurrency."""


@dataclass(frozen=True, slots=True)
class State:
    """Its state."""

    samples: Samples = ()
    panic_at: float | None = None
    """When the panic threshold was last exceeded, while in panic mode."""
    panic_most: int = 0


def step(state: State, *, total: float, target: float, since_s: float, ready: int, now: float) -> tuple[int, State]:
    """The recommendation; `total` is the mean over the last `since_s` seconds of all replicas together, `target` is
    per replica."""
    samples = added(state.samples, Sample(now, since_s, total), STABLE_WINDOW_S)
    each = target * UTILIZATION
    running = max(1, ready)
    most, least = math.ceil(UP_RATE * running), math.floor(ready / DOWN_RATE)
    raw_panic = math.ceil(mean(samples, now, PANIC_WINDOW_S) / each)
    stable = min(max(math.ceil(mean(samples, now, STABLE_WINDOW_S) / each), least), most)
    panic = min(max(raw_panic, least), most)
    panic_at, panic_most = state.panic_at, state.panic_most
    if raw_panic / running >= PANIC_THRESHOLD:
        panic_at = now
    elif panic_at is not None and panic_at + STABLE_WINDOW_S < now:
        panic_at, panic_most = None, 0
    if panic_at is None:
        return stable, State(samples)
    panic_most = max(panic_most, stable, panic)
    return panic_most, State(samples, panic_at, panic_most)
