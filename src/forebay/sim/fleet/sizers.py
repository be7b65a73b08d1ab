"""Sizers: the product's scaling decisions, and two baselines that know the load in advance."""

import math
from collections.abc import Sequence
from typing import Final

from forebay.core.scaling.decide import decide
from forebay.core.scaling.settings import Scale
from forebay.core.scaling.state import AutoscalerState
from forebay.core.scaling.values import Reading
from forebay.sim.fleet.fleet import EPOCH_S, Fleet
from forebay.sim.fleet.response import Response
from forebay.sim.fleet.values import Load

ATTAINMENT: Final = 0.99
"""Share of requests that must meet the objective."""
PERIOD_S: Final = 300.0
"""Interval at which the oracle chooses a new size."""
REPLICAS_MAX: Final = 256


class Scaler:
    """`core.scaling`, called as control does."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._state = AutoscalerState()

    def size(self, reading: Reading | None, now: float, current: int) -> int:
        """The decision of `decide`."""
        at = EPOCH_S + now if reading is None else reading.at
        decision, self._state = decide(self._scale, self._state, reading, at, current=current)
        return decision.wanted


class Planned:
    """A fixed plan of sizes per tick."""

    def __init__(self, plan: Sequence[int]) -> None:
        self._plan = plan
        self._at = 0

    def size(self, reading: Reading | None, now: float, current: int) -> int:
        """The next size."""
        self._at += 1
        return self._plan[min(self._at, len(self._plan) - 1)]


def peak(load: Load, response: Response, guess: int = 1) -> int:
    """The smallest constant size at which `ATTAINMENT` of all requests meet the objective."""
    return _fewest(load, response, guess)


def needed(load: Load, response: Response, period_s: float = PERIOD_S) -> list[int]:
    """The same for each period separately, per tick."""
    ticks = max(1, round(period_s / load.tick_s))
    need: list[int] = []
    last = 1
    for begin in range(0, len(load.arrivals), ticks):
        last = _fewest(part(load, begin, begin + ticks), response, last)
        need += [last] * min(ticks, len(load.arrivals) - begin)
    return need


def ahead(need: Sequence[int], start_s: float, tick_s: float) -> list[int]:
    """Sizes ordered ahead of time: the maximum needed within a start time."""
    ticks = math.ceil(start_s / tick_s)
    return [max(need[at : at + ticks + 1]) for at in range(len(need))]


def part(load: Load, begin: int, end: int) -> Load:
    """Some ticks of a load."""
    return Load(
        load.name, load.tick_s, load.arrivals[begin:end], load.prompt_tokens[begin:end], load.output_tokens[begin:end]
    )


def _fewest(load: Load, response: Response, guess: int) -> int:
    """Galloping, then binary search from a guess."""
    low, high, step = 0, REPLICAS_MAX, 1
    at = guess
    while low + 1 < high:
        fleet = Fleet(load, response, None, start_s=0.0, begin=at)
        if fleet.run().attainment >= ATTAINMENT:
            high = at
            at = max(low + 1, at - step) if high - low > step else (low + high) // 2
        else:
            low = at
            at = min(high - 1, at + step) if high - low > step else (low + high) // 2
        step *= 2
        at = min(max(at, low + 1), high - 1) if low + 1 < high else high
    return high
