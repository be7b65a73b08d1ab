"""How batch requests share replicas with more urgent ones: how many may run, and when one is preempted.

An urgent request never queues behind batch work in an engine: if no slot is free, the newest batch attempt is
preempted, which loses the least work. Doing so for every urgent request would waste many prefills, so batch work
leaves one slot free while urgent requests are arriving, and resumes only when two are free.
"""

import math
from typing import Final

from forebay.core.admission.pace import LEVELS, PaceLine

LATELY_S: Final = 30.0
"""This long after the last urgent request, batch work may use all slots again."""
SPARE: Final = 1
"""Slots of a replica that batch work leaves free while urgent requests are arriving."""
SLOWED_MAX: Final = 1 / 3
"""Batch work may lengthen the others' time per token by at most this share."""
GROWTH: Final = 1 / 80
"""Growth of the batch limit per second, as a share of the replica's slots, while its effect is not yet known."""


def batch_max(places: int, line: PaceLine | None, urgent: int, most: float) -> float:
    """How many batch requests may run at a replica beside `urgent` others; at least one. Called once a second.

    `most` is the current limit, 0 if urgent requests have only just appeared.
    """
    if line is None:
        return math.inf
    if line.slope_s is None:
        return max(1.0, places / LEVELS, most + GROWTH * places if most < math.inf else 0.0)
    if line.slope_s * places <= SLOWED_MAX * line.base_s:
        return math.inf
    return max(1.0, SLOWED_MAX * (line.base_s / line.slope_s + urgent))


def batch_room(places: int, batch: int, most: float) -> int:
    """Load at which a replica is full for batch work while urgent requests are arriving; it runs `batch` of `most`.

    An idle replica always accepts some.
    """
    return max(1, places - SPARE) if batch + 1 <= most else 0


def crowded(load: int, places: int, batch: int, most: float, stopped: int = 0) -> bool:
    """Whether another batch request must be preempted for an urgent one that is about to be sent there.

    `stopped`: those already preempted for it. As many are preempted as are needed for its slot; one, if batch work
    exceeds `most` by one or more, as others may end first. A smaller excess preempts none: the limit fluctuates.
    """
    return batch > 0 and (load >= places or (batch >= most + 1.0 and not stopped))
