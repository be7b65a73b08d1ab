"""Verdicts from evidence; may be asked for at any time and any number of times.

Each part of a metric has two tests, each with an e-value: is the canary worse than tolerated, and is it not? 1/e is a
p-value that stays valid under continuous monitoring (Ramdas et al., "Game-theoretic statistics and safe anytime-valid
inference", 2023). "Worse" for any part, with Holm's correction (1979), means rollback; for promotion every part of
every required metric must be fine, which needs no correction (Berger, 1982).
"""

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.core.rollout import bets, odds, ranks
from forebay.core.rollout.odds import Evidence
from forebay.core.rollout.values import (
    Cell,
    Decision,
    Finding,
    Metric,
    Part,
    Rate,
    RateState,
    Rules,
    State,
    Time,
    TimeState,
    Verdict,
)

UNKNOWN: Final = Evidence(0.0, 0.0)
UNSEEN: Final = "nothing compared yet"


class Question(NamedTuple):
    """The evidence for one part of a metric."""

    metric: str
    part: str
    worse: Evidence
    fine: Evidence
    stretch: float
    effect: float
    seen: str
    canary: int
    required: bool


def judge(rules: Rules, state: State, canary_per_s: float = 0.0) -> Verdict:
    """The verdict. `canary_per_s` is the rate of the canary's requests, to estimate the remaining time."""
    questions = [question for metric in rules.metrics for question in _questions(metric, state)]
    harmful = _harmful(questions, rules.rollback_alpha)
    parts = tuple(
        _part(rules, question, index in harmful, len(questions)) for index, question in enumerate(questions)
    )
    worse = [part for part in parts if part.finding is Finding.WORSE]
    if worse:
        return Verdict(Decision.ROLLBACK, "; ".join(_described(part) for part in worse), parts)
    if not any(part.required for part in parts):
        return Verdict(Decision.INCONCLUSIVE, "no metric is required", parts, math.inf, math.inf)
    missing = [part for part in parts if part.required and part.finding is not Finding.FINE]
    if not missing:
        return Verdict(Decision.PROMOTE, "no required metric is worse than tolerated", parts)
    needed = _needed(rules, questions, parts)
    needed_s = needed / canary_per_s if canary_per_s > 0 else math.inf
    names = ", ".join(f"{part.metric} ({part.part})" for part in missing)
    further = (
        "no number of requests would decide"
        if needed == math.inf
        else f"about {needed:,.0f} more canary requests would decide"
    )
    reason = f"not yet known to be fine: {names}; at the current trend {further}"
    return Verdict(Decision.INCONCLUSIVE, reason, parts, needed, needed_s)


def _questions(metric: Metric, state: State) -> Iterator[Question]:
    if isinstance(metric, Rate):
        yield _rate(metric, state.rates[metric.name])
    elif isinstance(metric, Time):
        yield from _time(metric, state.times[metric.name])
    else:
        score = state.scores[metric.name]
        found, effect = (bets.worse(score.bets), bets.fine(score.bets)), score.shift.mean
        seen = f"{effect:+.3f}, of which {-metric.drop:+g} is tolerated" if score.shift.weight else UNSEEN
        yield Question(metric.name, "score", *found, 1.0, effect, seen, score.canary, metric.required)


def _rate(metric: Rate, state: RateState) -> Question:
    """Worse: above the tolerated odds ratio and above the floor. Fine: below either."""
    total = state.total
    over, under = odds.floor_evidence(total.canary, total.canary_events, metric.floor)
    worse = odds.both(odds.above(state.odds), over)
    fine = odds.either(odds.below(state.odds), under)
    effect = odds.likely(state.odds, metric.ratio)
    return Question(metric.name, "rate", worse, fine, 1.0, effect, _shares(total), total.canary, metric.required)


def _time(metric: Time, state: TimeState) -> Iterator[Question]:
    stretch, required = ranks.stretch(state.swings), metric.required
    enough = state.blocks >= ranks.BLOCKS_MIN
    effect = math.exp(state.shift.mean)
    seen = f"{effect:.3g} times as large" if state.shift.weight else UNSEEN
    found = (ranks.larger(state.up), ranks.smaller(state.up)) if enough else (UNKNOWN, UNKNOWN)
    yield Question(metric.name, "centre", *found, stretch, effect, seen, state.canary, required)
    if metric.both_ways:
        found = (ranks.smaller(state.down), ranks.larger(state.down)) if enough else (UNKNOWN, UNKNOWN)
        yield Question(metric.name, "below", *found, stretch, effect, seen, state.canary, required)
    if metric.tail:
        found = (odds.above(state.tail), odds.below(state.tail)) if enough else (UNKNOWN, UNKNOWN)
        effect, total = odds.likely(state.tail, 1.0), state.tail_total
        seen = f"beyond {metric.tail_ratio:g} times the p{100 * metric.tail:g}: {_shares(total)}"
        stretch = max(stretch, ranks.stretch(state.tail_swings, ranks.usual(state.tail_swings)))
        yield Question(metric.name, "tail", *found, stretch, effect, seen, total.canary, required)


def _harmful(questions: list[Question], alpha: float) -> set[int]:
    """Indexes of the questions whose "not worse" is rejected after Holm's correction."""
    ordered = sorted(range(len(questions)), key=lambda index: (_p(questions[index].worse, questions[index]), index))
    found: set[int] = set()
    for index in ordered:
        if _p(questions[index].worse, questions[index]) > alpha / (len(questions) - len(found)):
            break
        found.add(index)
    return found


def _part(rules: Rules, question: Question, harmful: bool, several: int) -> Part:
    worse_p, fine_p = _p(question.worse, question), _p(question.fine, question)
    finding = Finding.WORSE if harmful else Finding.FINE if fine_p <= rules.promote_alpha else Finding.OPEN
    needed = 0.0
    if finding is Finding.OPEN:
        to_worse = _further(question.worse, question, rules.rollback_alpha / several)
        needed = min(to_worse, _further(question.fine, question, rules.promote_alpha))
    return Part(
        metric=question.metric,
        part=question.part,
        finding=finding,
        worse_p=worse_p,
        fine_p=fine_p,
        effect=question.effect,
        seen=question.seen,
        canary_samples=question.canary,
        needed_samples=needed,
        required=question.required,
    )


def _needed(rules: Rules, questions: list[Question], parts: tuple[Part, ...]) -> float:
    """Canary requests until the first part is worse, or the last required one is fine."""
    alpha = rules.rollback_alpha / len(questions)
    to_worse = min(_further(question.worse, question, alpha) for question in questions)
    to_fine = max(
        _further(question.fine, question, rules.promote_alpha)
        for question, part in zip(questions, parts, strict=True)
        if part.required
    )
    return min(to_worse, to_fine)


def _p(evidence: Evidence, question: Question) -> float:
    return math.exp(-max(0.0, evidence.log) / question.stretch)


def _further(evidence: Evidence, question: Question, alpha: float) -> float:
    """Canary requests until this evidence suffices, if it keeps growing like its best component so far."""
    lacking = -math.log(alpha) * question.stretch - evidence.log
    if lacking <= 0:
        return 0.0
    return math.ceil(lacking * question.canary / evidence.best) if evidence.best > 0 else math.inf


def _shares(total: Cell) -> str:
    stable, canary = total.stable_events / max(1, total.stable), total.canary_events / max(1, total.canary)
    return f"{canary:.3%} vs. {stable:.3%}"


def _described(part: Part) -> str:
    return f"{part.metric} ({part.part}) is worse than tolerated: {part.seen}"
