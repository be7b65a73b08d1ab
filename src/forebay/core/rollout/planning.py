"""Whether a plan can reach a verdict in its time: how fast evidence grows with the canary's requests.

Growth is the mean log e-value per canary request: for events the Kullback-Leibler divergence of the actual from the
tolerated distribution, for values and scores half the squared shift over its variance, as for normal sums. Log
evidence that grows by g per request has a variance of about 2g; the number of requests is chosen to suffice in nine
of ten rollouts. Values are assumed to be log-normal. This is for planning, accurate to a factor of two, not for
verdicts.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Final, NamedTuple

from forebay.core.rollout import bets, odds, ranks
from forebay.core.rollout.values import Metric, Rate, Rules, Score

NORMAL: Final = NormalDist()
POWER_Z: Final = NORMAL.inv_cdf(0.9)


class Step(NamedTuple):
    """A share of the traffic for a time. Shares 0 and 1 allow no comparison."""

    share: float
    time_s: float


class Plan(NamedTuple):
    """The steps, and the traffic."""

    requests_per_s: float
    steps: tuple[Step, ...]


class Need(NamedTuple):
    """Whether one part of a metric can be decided. `harm`: that a canary twice as far off as tolerated is
    detected."""

    metric: str
    part: str
    harm: bool
    samples_had: float
    """Canary requests in all steps in which both arms have traffic."""
    samples_needed: float
    time_had_s: float
    time_needed_s: float
    """With the last of these steps prolonged."""

    @property
    def met(self) -> bool:
        """Whether the plan is long enough."""
        return self.time_needed_s <= self.time_had_s


class Refusal(NamedTuple):
    """A plan that usually could not promote an equally good revision."""

    reason: str
    lacking: tuple[Need, ...]


def needs(rules: Rules, plan: Plan, baselines: Mapping[str, float]) -> tuple[Need, ...]:
    """The requirements of every metric.

    `baselines` are the stable arm's, by metric, within a stratum: a rate's share, the standard deviation of a time's
    logarithm, a score's standard deviation or, if paired, that of the differences. Raises KeyError if one is absent.
    """
    return tuple(
        _need(plan, enough, _Case(metric, part, baselines[metric.name], harm))
        for metric in rules.metrics
        for harm, alpha in ((False, rules.promote_alpha), (True, rules.rollback_alpha / _several(rules)))
        for part, enough in _parts(metric, alpha)
    )


def refusal(rules: Rules, plan: Plan, baselines: Mapping[str, float]) -> Refusal | None:
    """Why the plan is too short to find an equally good revision fine; None: it is not."""
    required = {metric.name for metric in rules.metrics if metric.required}
    lacking = tuple(
        need for need in needs(rules, plan, baselines) if not need.harm and not need.met and need.metric in required
    )
    return Refusal("; ".join(_described(need) for need in lacking), lacking) if lacking else None


def _several(rules: Rules) -> int:
    return sum(len(_parts(metric, 1.0)) for metric in rules.metrics)


def _parts(metric: Metric, alpha: float) -> list[tuple[str, float]]:
    """Parts, and the log evidence that each needs, including the cost of the mixture."""
    sure = -math.log(alpha)
    if isinstance(metric, Rate):
        return [("rate", sure + math.log(len(odds.FLOOR_RATIOS)))]
    if isinstance(metric, Score):
        return [("score", sure + math.log(len(bets.STAKES)))]
    parts = [("centre", sure + math.log(len(ranks.TILTS)))]
    if metric.both_ways:
        parts.append(("below", parts[0][1]))
    if metric.tail:
        parts.append(("tail", sure + math.log(odds.SIDE)))
    return parts


class _Case(NamedTuple):
    metric: Metric
    part: str
    baseline: float
    harm: bool


def _need(plan: Plan, enough: float, case: _Case) -> Need:
    information = had = time_s = 0.0
    compared = [step for step in plan.steps if 0 < step.share < 1]
    for step in compared:
        samples = plan.requests_per_s * step.share * step.time_s
        information += samples * _growth(case, step.share)
        had += samples
        time_s += step.time_s
    wanted = (POWER_Z / math.sqrt(2) + math.sqrt(POWER_Z**2 / 2 + enough)) ** 2
    needed = needed_s = math.inf
    growth = _growth(case, compared[-1].share) if compared else 0.0
    if information >= wanted:
        needed, needed_s = had * wanted / information, time_s * wanted / information
    elif growth > 0:
        further = (wanted - information) / growth
        needed, needed_s = had + further, time_s + further / (plan.requests_per_s * compared[-1].share)
    return Need(case.metric.name, case.part, case.harm, had, needed, time_s, needed_s)


def _growth(case: _Case, share: float) -> float:
    """Growth of log evidence per canary request."""
    metric, baseline = case.metric, case.baseline
    if isinstance(metric, Rate):
        return _rate_growth(metric, baseline, share, case.harm)
    if isinstance(metric, Score):
        return metric.drop**2 / (2 * baseline**2) * (1.0 if metric.paired else 1 - share)
    if case.part == "tail":
        stable = 1 - metric.tail
        shift = math.log(metric.tail_ratio) / baseline * (1 if case.harm else -1)
        return _conditional(NORMAL.cdf(NORMAL.inv_cdf(stable) + shift), stable, 1.0, share)
    excess = NORMAL.cdf(math.log(metric.ratio) / baseline / math.sqrt(2)) - 0.5
    return 6 * excess**2 * (1 - share)


def _rate_growth(metric: Rate, stable: float, share: float, harm: bool) -> float:
    canary = min(odds.SHARE_MAX, 2 * max(metric.ratio * stable, metric.floor)) if harm else stable
    relative = _conditional(canary, stable, metric.ratio, share)
    absolute = _divergence(canary, metric.floor)
    if harm:
        return min(relative, absolute)
    return max(relative, absolute if canary < metric.floor else 0.0)


def _conditional(canary: float, stable: float, ratio: float, share: float) -> float:
    """Growth from the arms of events, given that there are events."""
    rate = share * canary + (1 - share) * stable
    tolerated = share * ratio / (share * ratio + 1 - share)
    return rate / share * _divergence(share * canary / rate, tolerated) if rate > 0 else 0.0


def _divergence(p: float, q: float) -> float:
    """Kullback-Leibler divergence of Bernoulli(p) from Bernoulli(q), in nats; q is neither 0 nor 1."""
    heads = p * math.log(p / q) if p > 0 else 0.0
    return heads + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)


def _described(need: Need) -> str:
    if need.samples_needed == math.inf:
        return f"{need.metric} ({need.part}): no number of requests suffices, or no step compares the arms"
    return (
        f"{need.metric} ({need.part}): {need.samples_had:,.0f} canary requests in {need.time_had_s:,.0f} s, "
        f"but about {need.samples_needed:,.0f} are needed, {need.time_needed_s:,.0f} s"
    )
