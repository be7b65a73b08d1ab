"""How batch work shares replicas with all that is more urgent: what it may take, and when it has to step aside.

An urgent request never queues behind batch work in an engine: where no place is free, the newest batch attempt is
stopped, which costs the least. To stop one for every urgent request would waste its prompt each time; so batch work
leaves a place free while urgent requests are about, and comes back only when two are.
"""

import math
from typing import Final

from forebay.core.admission.toll import LEVELS, Line

LATELY_S: Final = 30.0
"""So long after the last urgent request batch work may have all the room that there is."""
SPARE: Final = 1
"""Places of a replica that batch work leaves free while urgent requests are about."""
SLOWED_MAX: Final = 1 / 3
"""By this share of what it would be without, batch work may lengthen the time between two tokens of the others."""
GROWTH: Final = 1 / 80
"""Of a replica's places, by which batch work may be more from second to second until it is known what that costs."""


def batch_max(places: int, line: Line | None, urgent: int, most: float) -> float:
    """How many batch requests may run at a replica beside so many `urgent` ones; at least one. Asked once a second.

    `most` is how many might until now, 0 if urgent requests have only just come.
    """
    if line is None:
        return math.inf
    if line.slope_s is None:
        return max(1.0, places / LEVELS, most + GROWTH * places if most < math.inf else 0.0)
    if line.slope_s * places <= SLOWED_MAX * line.base_s:
        return math.inf
    return max(1.0, SLOWED_MAX * (line.base_s / line.slope_s + urgent))


def batch_room(places: int, batch: int, most: float) -> int:
    """Load at which a replica is full for batch work while urgent requests are about; it runs `batch` of `most`.

    A replica that is idle altogether always takes some.
    """
    return max(1, places - SPARE) if batch + 1 <= most else 0


def crowded(load: int, places: int, batch: int, most: float, stopped: int = 0) -> bool:
    """Whether one more batch request has to step aside for an urgent one that is about to be sent there.

    As many are `stopped` for it as have its place, and where there is one too many or more, one: the others may end
    first. Where there is less than one too many none is: it would be let in again as `most` goes up and down.
    """
    return batch > 0 and (load >= places or (batch >= most + 1.0 and not stopped))
