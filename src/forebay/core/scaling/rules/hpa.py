"""The HorizontalPodAutoscaler of Kubernetes on a figure of each replica, with its defaults.

Source: "Algorithm details" of kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, and
calcPlainMetricReplicas in pkg/controller/podautoscaler/replica_calculator.go.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from forebay.core.scaling.rules.behaviour import DEFAULT, Past, held

SYNC_S: Final = 15.0
"""`--horizontal-pod-autoscaler-sync-period`: between two looks the last wish stands."""
TOLERANCE: Final = 0.1
"""`--horizontal-pod-autoscaler-tolerance`."""


@dataclass(frozen=True, slots=True)
class State:
    """What it remembers."""

    looked_at: float = 0.0
    wish: int | None = None
    """Of the last look."""
    past: Past = field(default_factory=Past)


def wanted(value: float, target: float, ready: int, pending: int, current: int) -> int:
    """⌈n · value / target⌉ for the mean `value` of the `ready` replicas; `current` within the tolerance.

    On the way up replicas that are not ready count as idle, and when that turns the direction nothing changes.
    """
    if not ready:
        return current
    ratio = value / target
    if abs(ratio - 1) <= TOLERANCE:
        return current
    if ratio <= 1 or not pending:
        return math.ceil(ratio * ready)
    ratio *= ready / (ready + pending)
    if ratio <= 1 + TOLERANCE:
        return current
    return math.ceil(ratio * (ready + pending))


def step(
    state: State, *, value: float, target: float, ready: int, pending: int, current: int, now: float
) -> tuple[int, State]:
    """How many it wants now: `value` is what ready replicas have on their mean, `target` what they should have."""
    if state.wish is not None and now - state.looked_at < SYNC_S:
        return state.wish, state
    many, past = held(DEFAULT, state.past, wanted(value, target, ready, pending, current), current, now)
    return many, State(now, many, past)
