"""The capacity of replicas within the service level objective, learned from their past.

n replicas together serve μ(n - b√n): the square-root law of many-server queues (Halfin and Whitt, "Heavy-traffic
limits for queues with many exponential servers", 1981), by which a few replicas need more headroom each than many. μ
is the work per second of a replica in a large fleet; b is how much of it must stay free, for bursts and for the
objective. Both are learned: the share of late responses is recorded by number of replicas and load, and the pair that
best separates loads with few late responses from those with many is chosen. Samples decay as new ones come, not with
time, so that a quiet night or weekend changes nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Final, NamedTuple

GOAL: Final = 0.01
"""Objectives are 99th percentiles."""
EDGE: Final = 1.2
"""Late responses at full capacity, as a multiple of GOAL: most of the time the load is lower than that."""
STEP: Final = math.log(1.06)
"""Loads that differ by less share a cell."""
CELLS_MAX: Final = 400
CELL_WEIGHT_MAX: Final = 4000.0
"""Weight at which a cell is saturated and forgets as many responses as are added."""
WEIGHT_MIN: Final = 50.0
"""Fewer responses are not significant."""
FREE: Final = (0.3, 0.45, 0.6, 0.75, 0.9)
"""Candidate values of b."""
FREE_USUAL: Final = 0.6
ANYWAY_MAX: Final = 12.0
ANYWAY_MIN: Final = 1000.0
ALIKE: Final = 1.3
SPAN: Final = 1.8
"""Strain above EDGE that is equal (within ALIKE) from the lowest loads to SPAN times of them is not caused by load:
no number of replicas changes it. Each half of these loads needs ANYWAY_MIN responses to conclude that. If it is above
ANYWAY_MAX, all of these loads may have been far too high."""
REACH: Final = 0.25
"""A load larger by this share than one that was served easily is assumed to be served as well."""
GATHERED_FROM: Final = 12
"""Above this, numbers of replicas are grouped, about 10 % apart."""


class Cell(NamedTuple):
    """Responses with this many replicas at this load."""

    replicas: int
    step: int
    """The logarithm of the work per second and replica, in STEPs, rounded."""
    weight: float
    """Number of responses (decayed)."""
    strain: float
    """Their mean strain; above 1 the objective is missed."""


class Capacity(NamedTuple):
    """The estimate: n replicas serve `rate` (n - `free` √n) work per second."""

    rate: float = 0.0
    """Work per second of a replica among many; 0: unknown."""
    free: float = FREE_USUAL
    known: bool = False
    """Overload was observed. False: `rate` is what was served so far, plus a little."""

    def of(self, replicas: int) -> float:
        """Work per second of this many replicas."""
        return self.rate * room(replicas, self.free)

    def need(self, work: float) -> int:
        """The fewest replicas for this much work per second, at least 1. `rate` must be above 0."""
        root = (self.free + math.sqrt(self.free**2 + 4 * work / self.rate)) / 2
        return max(math.ceil(root * root - 1e-9), 1)


class Pool(NamedTuple):
    """Loads with the same fitted share of late responses."""

    middle: float
    """Their geometric mean."""
    strain: float
    answers: float
    least: float
    most: float


def room(replicas: int, free: float) -> float:
    """The equivalent number of fully used replicas."""
    return replicas - free * math.sqrt(replicas)


def with_responses(
    cells: tuple[Cell, ...], replicas: int, load: float, answers: float, strain: float
) -> tuple[Cell, ...]:
    """The cells after more responses (above 0) of `replicas` at `load` (work per second and replica, above 0).

    Cells are sorted.
    """
    gathered, step = gather(replicas), round(math.log(load) / STEP)
    place = bisect_left(cells, (gathered, step))
    old = cells[place] if place < len(cells) and cells[place][:2] == (gathered, step) else None
    weight = answers + (min(old.weight, max(CELL_WEIGHT_MAX - answers, 0.0)) if old else 0.0)
    mean = old.strain + (strain - old.strain) * answers / weight if old else strain
    cell = Cell(gathered, step, round(weight, 1), round(mean, 4))
    if not old and len(cells) >= CELLS_MAX:
        lightest = min(cells, key=lambda each: (each.weight, each.replicas, each.step))
        return with_responses(tuple(each for each in cells if each is not lightest), replicas, load, answers, strain)
    return (*cells[:place], cell, *cells[place + (old is not None) :])


def gather(replicas: int) -> int:
    """The number of replicas that represents its group."""
    if replicas <= GATHERED_FROM:
        return replicas
    group = round(math.log(replicas / GATHERED_FROM) / math.log(1.1))
    return round(GATHERED_FROM * 1.1**group)


def fit(cells: Sequence[Cell], edge: float = EDGE, frees: Sequence[float] = FREE, anyway: float = 0.0) -> Capacity:
    """The capacity estimate from all cells: strain above `edge` is overload; b is chosen from `frees`.

    `anyway` is the strain that no number of replicas changes, which is subtracted.
    """
    best, least = Capacity(), math.inf
    cells = [cell._replace(strain=max(cell.strain - anyway, 0.0)) for cell in cells]
    for free in frees:
        loads = sorted(
            (cell.replicas * math.exp(cell.step * STEP) / room(cell.replicas, free), cell) for cell in cells
        )
        levels = list(_rising((cell.weight, cell.strain) for _, cell in loads))
        cost = sum(
            cell.weight * (math.sqrt(cell.strain) - math.sqrt(level)) ** 2
            for (_, cell), level in zip(loads, levels, strict=True)
        )
        cost *= 1 + (free - FREE_USUAL) ** 2
        if cells and cost < least:
            found = [(load, level, cell.weight) for (load, cell), level in zip(loads, levels, strict=True)]
            best, least = _edge(found, edge, free), cost
    return best


def unloaded(cells: Sequence[Cell]) -> float:
    """The strain that is not caused by load, such as that of prompts too long for the objective; 0: none."""
    loads = sorted(cells, key=itemgetter(1))
    seen = accumulate(cell.weight for cell in loads)
    begin = next((cell.step for cell, answers in zip(loads, seen, strict=True) if answers >= WEIGHT_MIN), 0)
    half = math.log(SPAN) / STEP / 2
    lower = _strain(cell for cell in loads if begin <= cell.step <= begin + half)
    upper = _strain(cell for cell in loads if begin + half < cell.step <= begin + 2 * half)
    return lower if EDGE < lower <= ANYWAY_MAX and upper <= lower * ALIKE else 0.0


def _strain(cells: Iterable[Cell]) -> float:
    """Mean strain over all their responses; NaN, which compares false with everything, if these are too few."""
    several = list(cells)
    answers = sum(cell.weight for cell in several)
    return sum(cell.weight * cell.strain for cell in several) / answers if answers >= ANYWAY_MIN else math.nan


def _rising(points: Iterable[tuple[float, float]]) -> Iterable[float]:
    """Isotonic regression of points (weight, value): pools adjacent violators into their means."""
    pools: list[tuple[float, float, int]] = []
    for weight, value in points:
        pool = (weight, value, 1)
        while pools and pools[-1][1] >= pool[1]:
            before = pools.pop()
            total = before[0] + pool[0]
            pool = (total, (before[0] * before[1] + pool[0] * pool[1]) / total, before[2] + pool[2])
        pools.append(pool)
    for _, value, count in pools:
        yield from [value] * count


def _edge(loads: Iterable[tuple[float, float, float]], edge: float, free: float) -> Capacity:
    """The load at which the strain is `edge`. `loads` are load, strain and responses, in order.

    If the strain rises slowly, as with bursty loads, many neighbours share one strain. Between two such pools the
    root of the strain is interpolated linearly: with a step, a little more or less strain would halve or double the
    capacity. The line begins and ends in the middle of a pool, but the further `edge` is from what was served (or was
    overload), the nearer to the pool's highest (lowest) load: that is known then.
    """
    before, seen = None, 0.0
    for pool in _pools(loads):
        if pool.strain > edge:
            if before is None:
                return Capacity(pool.least / (1 + REACH), free, True)
            borne = before.middle * (before.most / before.middle) ** (1 - before.strain / edge)
            much = pool.middle * (pool.least / pool.middle) ** (1 - edge / pool.strain)
            low, high = math.sqrt(before.strain), math.sqrt(pool.strain)
            part = (math.sqrt(edge) - low) / (high - low)
            return Capacity(min(borne * (much / borne) ** part, before.most * (1 + REACH)), free, True)
        seen += pool.answers
        if seen >= WEIGHT_MIN:
            before = pool
    return Capacity(before.most * (1 + REACH * (1 - before.strain / edge)) if before else 0.0, free, False)


def _pools(loads: Iterable[tuple[float, float, float]]) -> Iterable[Pool]:
    """Groups of neighbouring loads with equal strain."""
    for strain, same in groupby(loads, key=itemgetter(1)):
        points = list(same)
        answers = sum(weight for _, _, weight in points)
        middle = math.exp(sum(math.log(load) * weight for load, _, weight in points) / answers)
        yield Pool(middle, strain, answers, points[0][0], points[-1][0])
