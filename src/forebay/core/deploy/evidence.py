"""A rollout's metrics, the observations that request samples yield for them, and whether its plan is long enough."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from forebay.core.deploy.course import Course, Kind
from forebay.core.deploy.samples import Sample
from forebay.core.deploy.settings import RolloutSettings
from forebay.core.errors import OK, TABLE, Blame, Code
from forebay.core.model import Task
from forebay.core.resilience import Outcome, outcome_of
from forebay.core.rollout import (
    Arm,
    Harm,
    Incident,
    Metric,
    Observation,
    Plan,
    Rate,
    Rules,
    State,
    Step,
    Time,
    refusal,
)
from forebay.core.rollout.sketch import GROWTH
from forebay.core.rollout.values import Shift

ERRORS: Final = "errors"
REJECTIONS: Final = "rejections"
QUALITY: Final = "quality"
VALIDITY: Final = "validity"
AGREEMENT: Final = "agreement"
PREFERENCE: Final = "preference"
GOLDEN: Final = "golden"
"""The stratum of answers to the golden set."""
PRIORS: Final[Mapping[str, float]] = {
    ERRORS: 0.001,
    REJECTIONS: 0.01,
    "ttft": 0.8,
    "tpot": 0.3,
    "latency": 0.8,
    "length": 0.9,
    "refusals": 0.01,
    "degenerate": 0.001,
    QUALITY: 0.2,
}
"""Assumed baselines while nothing was observed: a rate's share, the standard deviation of a time's logarithm, for the
golden set that of the differences. Rules of thumb, and reported as assumptions."""
RATE_SAMPLES_MIN: Final = 500
"""With fewer requests the share of rare events is not known."""
TIME_SAMPLES_MIN: Final = 100
SCORE_SAMPLES_MIN: Final = 50
SPREAD_MIN: Final = 0.05
"""Lower bound of a spread: values that have not varied yet may still vary."""


class Pace(NamedTuple):
    """The expected rate of observations."""

    requests_per_s: float
    """Of the model, both revisions together."""
    golden_per_s: float = 0.0
    """Cases of the golden set."""


def rules_of(task: Task, settings: RolloutSettings, kind: Kind) -> Rules:
    """The metrics of a rollout. Shadow responses are discarded, so their speed is no evidence."""
    metrics: list[Metric] = [settings.errors.value(ERRORS), settings.rejections.value(REJECTIONS)]
    if kind is not Kind.SHADOW:
        metrics.append(settings.latency.value("latency", task))
    elif task is Task.EMBED:
        metrics.append(settings.agreement.value(AGREEMENT, task))
    if task is Task.CHAT:
        metrics += _shadow_metrics(settings) if kind is Kind.SHADOW else _token_metrics(settings)
        if settings.golden is not None:
            metrics.append(settings.quality.value(QUALITY))
    return Rules(tuple(metrics), settings.rollback_alpha, settings.promote_alpha)


def fault(code: str) -> bool | None:
    """Whether a request failed because of the replica; None: undetermined for this outcome."""
    if code == OK:
        return False
    return True if code in _CODES and outcome_of(Code(code)) is Outcome.FAILED else None


def rejected(code: str) -> bool | None:
    """Whether the replica rejected the request as a client error; None: it ended before that was known."""
    if code == OK:
        return False
    return True if code in _CODES and TABLE[Code(code)].blame is Blame.CLIENT else None


def observations(samples: Iterable[Sample], rules: Rules) -> list[Observation]:
    """The observations of the rules' metrics in request samples, in order.

    Values come from successful responses only; warm-up samples are skipped.
    """
    asked = {metric.name for metric in rules.metrics}
    found: list[Observation] = []
    for sample in samples:
        if sample.early:
            continue
        arm, stratum = sample.arm, sample.stratum
        found += [
            Observation(name, arm, float(value), stratum)
            for name, value in _figures(sample)
            if name in asked and value is not None
        ]
    return found


def incidents(samples: Iterable[Sample]) -> tuple[list[Incident], list[float]]:
    """The canary's server errors, and the end times of all its answers, good or bad. For `tripped`."""
    harm: list[Incident] = []
    answers_at_s: list[float] = []
    for sample in samples:
        bad = fault(sample.code)
        if sample.arm is Arm.CANARY and bad is not None:
            answers_at_s.append(sample.at)
            if bad:
                harm.append(Incident(Harm.SERVER_ERROR, sample.at))
    return harm, answers_at_s


def undecided(rules: Rules, course: Course, pace: Pace, known: State | None) -> str | None:
    """Why an equally good revision could usually not be promoted within the plan's time; None: it could.

    None also if nothing is promoted by evidence, as in a blue-green rollout. `known` is the state of a former rollout
    of the model: its stable arm shows how much values vary.
    """
    if course.kind is not Kind.CANARY:
        return None
    figures, assumed = baselines(rules, known)
    steps = tuple(Step(share, time_s - course.warm_up_s) for share, time_s in course.steps)
    golden = tuple(metric for metric in rules.metrics if metric.name == QUALITY)
    live = tuple(metric for metric in rules.metrics if metric.name != QUALITY)
    # Cases go to both arms equally, whatever the share: half of twice as many.
    asked = tuple(Step(0.5, step.time_s) for step in steps)
    wants = (
        ("requests/s", pace.requests_per_s, live, Plan(pace.requests_per_s, steps)),
        ("cases/s of the golden set", pace.golden_per_s, golden, Plan(2 * pace.golden_per_s, asked)),
    )
    lacking = []
    for what, per_s, metrics, plan in wants:
        why = _lacking(replace(rules, metrics=metrics), plan, figures)
        if why:
            lacking.append(f"at {per_s:.3g} {what}: {why}")
    if not lacking:
        return None
    required = {metric.name for metric in rules.metrics if metric.required}
    guessed = ", ".join(f"{name} {PRIORS[name]:g}" for name in assumed if name in required)
    note = f" (not observed yet, assumed to vary as usual: {guessed})" if guessed else ""
    return "; ".join(lacking) + note


def baselines(rules: Rules, known: State | None) -> tuple[dict[str, float], tuple[str, ...]]:
    """The stable arm's baselines for `refusal`, by metric, and the metrics for which they are assumed."""
    found: dict[str, float] = {}
    assumed: list[str] = []
    for metric in rules.metrics:
        seen = None if known is None else _seen(metric, known)
        if seen is None:
            assumed.append(metric.name)
        found[metric.name] = PRIORS[metric.name] if seen is None else seen
    return found, tuple(assumed)


_CODES: Final = frozenset(Code)


def _lacking(rules: Rules, plan: Plan, figures: Mapping[str, float]) -> str:
    """What is missing; empty: nothing."""
    if plan.requests_per_s <= 0:
        return "no requests to compare" if any(metric.required for metric in rules.metrics) else ""
    refused = refusal(rules, plan, figures)
    return refused.reason if refused else ""


def _token_metrics(settings: RolloutSettings) -> list[Metric]:
    return [
        settings.ttft.value("ttft"),
        settings.tpot.value("tpot"),
        settings.length.value("length"),
        settings.refusals.value("refusals"),
        settings.degenerate.value("degenerate"),
    ]


def _shadow_metrics(settings: RolloutSettings) -> list[Metric]:
    metrics: list[Metric] = [settings.validity.value(VALIDITY)]
    if settings.similarity is not None:
        metrics.append(settings.agreement.value(AGREEMENT, Task.CHAT))
    if settings.judge is not None:
        metrics.append(settings.preference.value(PREFERENCE))
    return metrics


def _figures(sample: Sample) -> tuple[tuple[str, float | None], ...]:
    """Values by metric; None: unknown."""
    bad, refused = fault(sample.code), rejected(sample.code)
    if sample.code != OK:
        return ((ERRORS, bad), (REJECTIONS, refused))
    return (
        (ERRORS, bad),
        (REJECTIONS, refused),
        ("ttft", _known(sample.ttft_s)),
        ("tpot", _known(sample.tpot_s)),
        ("latency", _known(sample.latency_s)),
        ("length", _known(sample.output_tokens)),
        ("refusals", sample.refused),
        ("degenerate", sample.degenerate),
    )


def _known(figure: float) -> float | None:
    return figure if figure > 0 else None


def _seen(metric: Metric, known: State) -> float | None:
    """The stable arm's baseline from a former rollout; None: too few observations."""
    if isinstance(metric, Rate):
        rate = known.rates.get(metric.name)
        enough = rate is not None and rate.total.stable >= RATE_SAMPLES_MIN
        return rate.total.stable_events / rate.total.stable if rate and enough else None
    if isinstance(metric, Time):
        time = known.times.get(metric.name)
        return _spread(time.sketches.values()) if time else None
    score = known.scores.get(metric.name)
    return _deviation(score.shift) if score else None


def _spread(sketches: Iterable[Mapping[int, int]]) -> float | None:
    """The standard deviation of the logarithm within strata, as precise as the sketch's buckets."""
    several, squares = 0, 0.0
    for sketch in sketches:
        count = sum(sketch.values())
        mean = sum(index * times for index, times in sketch.items()) / max(1, count)
        squares += sum(times * (index - mean) ** 2 for index, times in sketch.items())
        several += count
    return max(SPREAD_MIN, GROWTH * math.sqrt(squares / several)) if several >= TIME_SAMPLES_MIN else None


def _deviation(shift: Shift) -> float | None:
    """The standard deviation of paired differences, each with weight 1."""
    if shift.weight < SCORE_SAMPLES_MIN:
        return None
    return max(SPREAD_MIN, math.sqrt(max(0.0, shift.squares_dd / shift.squares - shift.mean**2)))
