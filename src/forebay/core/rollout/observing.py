"""Accumulates observations as evidence: pure functions from a state and a batch to the next state.

Values are compared within blocks: requests of one stratum that arrived about the same time. A block is full when it
has BLOCK_MIN requests and some of each arm; this depends on arms and never on values, so neither different prompt
mixes of the arms nor changing load biases the comparison. Within a batch the order of observations does not matter,
except for scores, whose large blocks are divided, and for which values of one arm are kept until the other's arrive
(`WAITING_MAX`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from forebay.core.rollout import bets, odds, ranks, sketch
from forebay.core.rollout.values import (
    STRATA_MAX,
    Arm,
    Cell,
    Metric,
    Observation,
    Rate,
    RateState,
    Rules,
    Score,
    ScoreState,
    State,
    Time,
    TimeState,
    Waiting,
)

BLOCK_MIN: Final = 16
"""With 16 requests, ranks within blocks have 94 % of the efficiency of ranks over all."""
WAITING_MAX: Final = 64
"""Values of one arm that are kept until the other's arrive; the latest are kept."""
TAIL_FIGURES_MIN: Final = 10
"""Values of the stable arm that must lie beyond a stratum's quantile before it is used."""
Groups = Mapping[str, Waiting]
V = TypeVar("V")


def begin(rules: Rules) -> State:
    """The initial state."""
    rates, times, scores = {}, {}, {}
    for metric in rules.metrics:
        if isinstance(metric, Rate):
            rates[metric.name] = RateState(odds.NOTHING)
        elif isinstance(metric, Time):
            times[metric.name] = TimeState(ranks.NOTHING, ranks.NOTHING, odds.NOTHING)
        else:
            scores[metric.name] = ScoreState(bets.NOTHING)
    return State(rates, times, scores)


def observe(rules: Rules, state: State, batch: Iterable[Observation]) -> State:
    """The state after a batch of observations, without warm-up, that arrived within about ten seconds."""
    several, grouped = _grouped(batch)
    rates, times, scores = dict(state.rates), dict(state.times), dict(state.scores)
    counted = ignored = 0
    for metric in rules.metrics:
        name = metric.name
        groups = {stratum: _possible(metric, group) for stratum, group in sorted(grouped.get(name, {}).items())}
        groups = {stratum: group for stratum, group in groups.items() if group.stable or group.canary}
        if not groups:
            continue
        counted += sum(len(group.stable) + len(group.canary) for group in groups.values())
        if isinstance(metric, Rate):
            groups, more = _within_limit(rates[name].waiting, groups)
            rates[name] = _rate(metric, rates[name], groups)
        elif isinstance(metric, Time):
            groups, more = _within_limit(times[name].waiting, groups)
            times[name] = _time(metric, times[name], groups)
        else:
            groups, more = _within_limit(scores[name].waiting, groups)
            scores[name] = _score(metric, scores[name], groups)
        ignored += more
    return State(rates, times, scores, state.ignored + ignored + several - counted)


def _grouped(batch: Iterable[Observation]) -> tuple[int, dict[str, dict[str, Waiting]]]:
    """The number of observations, and their values by metric, stratum and arm."""
    lists: dict[tuple[str, str, Arm], list[float]] = {}
    several = 0
    for name, arm, value, stratum in batch:
        several += 1
        key = (name, stratum, arm)
        if key in lists:
            lists[key].append(value)
        else:
            lists[key] = [value]
    found: dict[str, dict[str, Waiting]] = {}
    for (name, stratum, arm), values in lists.items():
        by_stratum = found.setdefault(name, {})
        group = by_stratum.get(stratum, Waiting())
        if arm is Arm.CANARY:
            by_stratum[stratum] = group._replace(canary=tuple(values))
        else:
            by_stratum[stratum] = group._replace(stable=tuple(values))
    return several, found


def _possible(metric: Metric, group: Waiting) -> Waiting:
    """The group without values that are invalid for the metric."""
    if isinstance(metric, Rate):
        kept = [[value for value in values if value in {0.0, 1.0}] for values in group]
    elif isinstance(metric, Time):
        kept = [[value for value in values if 0.0 < value < math.inf] for values in group]
    else:
        low = -1.0 if metric.paired else 0.0
        kept = [[value for value in values if low <= value <= 1.0] for values in group]
    return Waiting(tuple(kept[0]), tuple(kept[1]))


def _within_limit(waiting: Mapping[str, V], groups: Groups) -> tuple[dict[str, Waiting], int]:
    """The groups of known strata and of as many new ones as fit; also the number of values left out."""
    room = STRATA_MAX - len(waiting)
    new = [stratum for stratum in groups if stratum not in waiting]
    beyond = set(new[room:])
    kept = {stratum: group for stratum, group in groups.items() if stratum not in beyond}
    return kept, sum(len(groups[stratum].stable) + len(groups[stratum].canary) for stratum in beyond)


def _full(stable: int, canary: int) -> bool:
    return stable + canary >= BLOCK_MIN and stable > 0 and canary > 0


def _joined(waiting: Waiting | None, group: Waiting) -> Waiting:
    if waiting is None:
        return group
    return Waiting(waiting.stable + group.stable, waiting.canary + group.canary)


def _kept(block: Waiting) -> Waiting:
    return Waiting(block.stable[-WAITING_MAX:], block.canary[-WAITING_MAX:])


def _rate(metric: Rate, state: RateState, groups: Groups) -> RateState:
    seen, total, waiting = state.odds, state.total, dict(state.waiting)
    for stratum, (stable, canary) in groups.items():
        cell = Cell(len(stable), int(sum(stable)), len(canary), int(sum(canary)))
        total = total.plus(cell)
        block = waiting.get(stratum, Cell()).plus(cell)
        if _full(block.stable, block.canary):
            seen = odds.with_block(seen, block, metric.ratio)
            block = Cell()
        waiting[stratum] = block
    return RateState(seen, total, waiting)


def _time(metric: Time, state: TimeState, groups: Groups) -> TimeState:
    waiting = dict(state.waiting)
    for stratum, group in groups.items():
        block = _joined(waiting.get(stratum), group)
        if _full(len(block.stable), len(block.canary)):
            state = _with_block(metric, state, stratum, block)
            block = Waiting()
        waiting[stratum] = _kept(block)
    canary = sum(len(group.canary) for group in groups.values())
    return replace(state, waiting=waiting, canary=state.canary + canary)


def _with_block(metric: Time, state: TimeState, stratum: str, block: Waiting) -> TimeState:
    stable, canary = block
    up = ranks.ranked([figure / metric.ratio for figure in canary], stable)
    below = state.down
    if metric.both_ways:
        below = _sums(below, ranks.ranked([figure * metric.ratio for figure in canary], stable).gains)
    known = state.sketches.get(stratum, {})
    tail, cell, tail_swings = state.tail, Cell(), state.tail_swings
    if metric.tail:
        end = sketch.quantile(known, metric.tail, math.ceil(TAIL_FIGURES_MIN / (1 - metric.tail)))
        if end is not None:
            beyond = sum(figure > metric.tail_ratio * end for figure in canary)
            cell = Cell(len(stable), sum(figure > end for figure in stable), len(canary), beyond)
            tail = odds.with_block(tail, cell, 1.0)
            tail_swings = ranks.with_swing(tail_swings, odds.surprise(cell))
    difference = _mean([math.log(figure) for figure in canary]) - _mean([math.log(figure) for figure in stable])
    return replace(
        state,
        up=_sums(state.up, up.gains),
        down=below,
        tail=tail,
        tail_total=state.tail_total.plus(cell),
        blocks=state.blocks + 1,
        sketches={**state.sketches, stratum: sketch.with_figures(known, stable)},
        shift=state.shift.plus(difference, _weight(block)),
        swings=ranks.with_swing(state.swings, up.z),
        tail_swings=tail_swings,
    )


def _score(metric: Score, state: ScoreState, groups: Groups) -> ScoreState:
    wealth, shift, waiting = state.bets, state.shift, dict(state.waiting)
    for stratum, group in groups.items():
        if metric.paired:
            for difference in (*group.stable, *group.canary):
                wealth = bets.with_difference(wealth, difference, metric.drop)
                shift = shift.plus(difference, 1.0)
            waiting[stratum] = Waiting()
            continue
        block = _joined(waiting.get(stratum), group)
        if _full(len(block.stable), len(block.canary)):
            for small in _divided(block):
                difference = _mean(small.canary) - _mean(small.stable)
                wealth = bets.with_difference(wealth, difference, metric.drop)
                shift = shift.plus(difference, _weight(small))
            block = Waiting()
        waiting[stratum] = _kept(block)
    canary = sum(len(group.canary) for group in groups.values())
    return ScoreState(wealth, state.canary + canary, waiting, shift)


def _divided(block: Waiting) -> list[Waiting]:
    """The smallest possible blocks, in the order of arrival: a bet on a mean of many wins no more than one on one
    value."""
    stable, canary = len(block.stable), len(block.canary)
    several = min(stable, canary, (stable + canary) // BLOCK_MIN)
    return [
        Waiting(
            block.stable[stable * index // several : stable * (index + 1) // several],
            block.canary[canary * index // several : canary * (index + 1) // several],
        )
        for index in range(several)
    ]


def _weight(block: Waiting) -> float:
    """The inverse variance of the difference of two means, up to a factor."""
    stable, canary = len(block.stable), len(block.canary)
    return stable * canary / (stable + canary)


def _mean(figures: Sequence[float]) -> float:
    return math.fsum(figures) / len(figures)


def _sums(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))
