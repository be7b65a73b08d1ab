"""What a rollout is judged by: the metrics of its rules, what samples of requests say of them, and whether its plan
is long enough for them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from forebay.core.deploy.course import Course, Kind
from forebay.core.deploy.samples import OK, Sample
from forebay.core.deploy.settings import RolloutSettings
from forebay.core.errors import TABLE, Blame, Code
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
"""What plans are judged by where nothing was seen yet: of a rate its share, of a time the standard deviation of its
logarithm, of the golden set that of the differences. Rules of thumb, and told as such."""
RATE_SAMPLES_MIN: Final = 500
"""Of fewer requests the share of rare events is not known."""
TIME_SAMPLES_MIN: Final = 100
SCORE_SAMPLES_MIN: Final = 50
SPREAD_MIN: Final = 0.05
"""Figures that have never differed are not taken for ones that never will."""


class Pace(NamedTuple):
    """How much there will be to compare."""

    requests_per_s: float
    """Of the model, both revisions together."""
    golden_per_s: float = 0.0
    """Cases of the golden set."""


def rules_of(task: Task, settings: RolloutSettings, kind: Kind) -> Rules:
    """The metrics of a rollout. Nobody waits for the answers of a shadow, so how fast they come is no evidence."""
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
    """Whether a request went wrong through the replica; None: that cannot be said of this end."""
    if code == OK:
        return False
    return True if code in _CODES and outcome_of(Code(code)) is Outcome.FAILED else None


def rejected(code: str) -> bool | None:
    """Whether the replica took a request for a mistake of the client; None: it did not come to that."""
    if code == OK:
        return False
    return True if code in _CODES and TABLE[Code(code)].blame is Blame.CLIENT else None


def observations(samples: Iterable[Sample], rules: Rules) -> list[Observation]:
    """What requests say of the metrics that are asked for, in their order.

    Figures count of good answers only, and nothing of the warm-up.
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
    """The canary's server errors, and when each of its answers ended that was one, good or bad. For `tripped`."""
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
    """Why a revision that is as good as the present one could most often not be promoted in the time of the plan.

    None: it could; or nothing is promoted by evidence, as with a blue-green rollout. `known` is the state of a former
    rollout of the model: its stable arm says how much figures vary.
    """
    if course.kind is not Kind.CANARY:
        return None
    figures, assumed = baselines(rules, known)
    steps = tuple(Step(share, time_s - course.warm_up_s) for share, time_s in course.steps)
    golden = tuple(metric for metric in rules.metrics if metric.name == QUALITY)
    live = tuple(metric for metric in rules.metrics if metric.name != QUALITY)
    # Cases are asked of both arms whatever the share is: half of the double.
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
    """What `refusal` needs to know of the stable arm, by metric, and for which metrics it was assumed."""
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
    """Empty: nothing."""
    if plan.requests_per_s <= 0:
        return "there is nothing to compare" if any(metric.required for metric in rules.metrics) else ""
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
    """By metric; None: unknown."""
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
    """Of the stable arm in a former rollout; None: too little."""
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
    """The standard deviation of the logarithm within strata, to the width of a range of the sketch."""
    several, squares = 0, 0.0
    for sketch in sketches:
        count = sum(sketch.values())
        mean = sum(index * times for index, times in sketch.items()) / max(1, count)
        squares += sum(times * (index - mean) ** 2 for index, times in sketch.items())
        several += count
    return max(SPREAD_MIN, GROWTH * math.sqrt(squares / several)) if several >= TIME_SAMPLES_MIN else None


def _deviation(shift: Shift) -> float | None:
    """Of paired differences, each of which has the weight 1."""
    if shift.weight < SCORE_SAMPLES_MIN:
        return None
    return max(SPREAD_MIN, math.sqrt(max(0.0, shift.squares_dd / shift.squares - shift.mean**2)))
