"""The HorizontalPodAutoscaler of Kubernetes on a per-replica metric, with its defaults.

Source: "Algorithm details" of kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, and
calcPlainMetricReplicas in pkg/controller/podautoscaler/replica_calculator.go.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from forebay.core.scaling.rules.behaviour import DEFAULT, Past, held

SYNC_S: Final = 15.0
"""`--horizontal-pod-autoscaler-sync-period`: between two evaluations the last recommendation stands."""
TOLERANCE: Final = 0.1
"""`--horizontal-pod-autoscaler-tolerance`."""


@dataclass(frozen=True, slots=True)
class State:
    """Its state."""

    looked_at: float = 0.0
    wish: int | None = None
    """Of the last evaluation."""
    past: Past = field(default_factory=Past)


def wanted(value: float, target: float, ready: int, pending: int, current: int) -> int:
    """⌈n · value / target⌉ for the mean `value` of the `ready` replicas; `current` within the tolerance.

    When scaling up, replicas that are not ready count as idle; if that reverses the direction, nothing changes.
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
    """The recommendation: `value` is the mean over ready replicas, `target` the desired mean."""
    if state.wish is not None and now - state.looked_at < SYNC_S:
        return state.wish, state
    many, past = held(DEFAULT, state.past, wanted(value, target, ready, pending, current), current, now)
    return many, State(now, many, past)
