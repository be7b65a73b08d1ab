"""Metrics of replays: means over seeds with confidence intervals, and differences paired by seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from forebay.sim.replay.cluster import SimCluster
from forebay.sim.replay.outcome import QUANTILES, Summary

_P50, _P90, _P99 = (QUANTILES.index(q) for q in (50, 90, 99))
T_95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, 97.5 %, for 1 to 30 degrees of freedom."""
Z_95: Final = 1.959964
USUAL: Final = "cpr"
"""The default routing policy, which is omitted from labels of sized fleets."""
_Line = tuple[float, str, str]
"""Scale, policy, fleet."""


class Unit(Enum):
    """The unit of a metric, for formatting."""

    SHARE = "share"
    SECONDS = "seconds"
    RATIO = "ratio"
    COUNT = "count"
    MONEY = "money"


class Figure(NamedTuple):
    """A metric of a replay."""

    label: str
    unit: Unit
    better: int
    """1: more is better, -1: less is, 0: neither."""
    of: Callable[[Summary, SimCluster], float | None]
    """None: not applicable."""


def _gpu_hours(summary: Summary, cluster: SimCluster) -> float:
    return summary.replica_hours * cluster.tensor_parallel


def _cost(summary: Summary, cluster: SimCluster) -> float | None:
    price = cluster.gpu_hour_price
    return None if price is None else price * _gpu_hours(summary, cluster)


FIGURES: Final[Mapping[str, Figure]] = {
    "goodput": Figure("goodput", Unit.SHARE, 1, lambda s, _: s.goodput),
    "goodput_per_s": Figure("goodput/s", Unit.RATIO, 1, lambda s, _: s.goodput_per_s),
    "ttft_mean_s": Figure("TTFT mean", Unit.SECONDS, -1, lambda s, _: s.ttft_mean_s),
    "ttft_p50_s": Figure("TTFT p50", Unit.SECONDS, -1, lambda s, _: s.ttft_s[_P50]),
    "ttft_p90_s": Figure("TTFT p90", Unit.SECONDS, -1, lambda s, _: s.ttft_s[_P90]),
    "ttft_p99_s": Figure("TTFT p99", Unit.SECONDS, -1, lambda s, _: s.ttft_s[_P99]),
    "tpot_p50_s": Figure("TPOT p50", Unit.SECONDS, -1, lambda s, _: s.tpot_s[_P50]),
    "tpot_p90_s": Figure("TPOT p90", Unit.SECONDS, -1, lambda s, _: s.tpot_s[_P90]),
    "tpot_p99_s": Figure("TPOT p99", Unit.SECONDS, -1, lambda s, _: s.tpot_s[_P99]),
    "e2e_p50_s": Figure("e2e p50", Unit.SECONDS, -1, lambda s, _: s.e2e_s[_P50]),
    "e2e_p90_s": Figure("e2e p90", Unit.SECONDS, -1, lambda s, _: s.e2e_s[_P90]),
    "e2e_p99_s": Figure("e2e p99", Unit.SECONDS, -1, lambda s, _: s.e2e_s[_P99]),
    "cache_hit": Figure("cache hit", Unit.SHARE, 1, lambda s, _: s.cache_hit),
    "imbalance": Figure("busiest/mean", Unit.RATIO, -1, lambda s, _: s.imbalance),
    "busy": Figure("busy", Unit.SHARE, 0, lambda s, _: s.busy),
    "refused": Figure("refused", Unit.COUNT, -1, lambda s, _: float(sum(s.refused.values()))),
    "preemptions": Figure("preempted", Unit.COUNT, -1, lambda s, _: float(s.preemptions)),
    "lasted_s": Figure("lasted", Unit.SECONDS, 0, lambda s, _: s.lasted_s),
    "replicas_mean": Figure("replicas", Unit.COUNT, -1, lambda s, _: s.replicas_mean),
    "replicas_max": Figure("at most", Unit.COUNT, -1, lambda s, _: float(s.replicas_max)),
    "turns": Figure("turns", Unit.COUNT, -1, lambda s, _: float(s.turns)),
    "starts": Figure("starts", Unit.COUNT, 0, lambda s, _: float(s.started)),
    "gpu_hours": Figure("GPU-hours", Unit.COUNT, -1, _gpu_hours),
    "cost": Figure("cost", Unit.MONEY, -1, _cost),
}
"""By stable name, with the unit as suffix."""


class Estimate(NamedTuple):
    """A mean over seeds."""

    mean: float
    half_width: float | None
    """Half-width of its 95 % confidence interval; None with a single value."""

    @property
    def is_clear(self) -> bool:
        """Whether 0 is outside of the interval."""
        return self.half_width is not None and abs(self.mean) > self.half_width


class Result(NamedTuple):
    """One replay."""

    policy: str
    scale: float
    seed: int
    summary: Summary
    fleet: str = ""
    """The fleet's sizer; empty: constant size."""


def label(policy: str, fleet: str) -> str:
    """The row label: the sizer of the fleet, if there is one, and the policy."""
    return policy if not fleet else fleet if policy == USUAL else f"{fleet}, {policy}"


class Row(NamedTuple):
    """One policy at one scale of step times, over all seeds."""

    policy: str
    scale: float
    requests: int
    figures: Mapping[str, Estimate]
    """By the names of `FIGURES`, without those that do not apply."""
    refused: Mapping[str, float]
    """Error code → requests, mean over seeds."""
    against: Mapping[str, Estimate]
    """Difference to the first policy, paired by seed; empty for the first policy itself."""
    fleet: str = ""

    @property
    def name(self) -> str:
        """The label in tables."""
        return label(self.policy, self.fleet)


def t_95(freedom: int) -> float:
    """Student's t for a two-sided 95 % interval; above 30 degrees of freedom by its expansion around the normal's
    (Abramowitz and Stegun 26.7.5), which is right to 0.001 there."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = Z_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value, with its confidence interval."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, t_95(count - 1) * math.sqrt(variance / count))


def rows(results: Sequence[Result], cluster: SimCluster) -> list[Row]:
    """One row per policy and scale, in order of first appearance; others are compared with the first policy. All must
    have the same seeds at the same scales."""
    groups: dict[_Line, dict[int, Summary]] = {}
    for result in results:
        groups.setdefault((result.scale, result.policy, result.fleet), {})[result.seed] = result.summary
    return [_row(at, groups, (results[0].policy, results[0].fleet), cluster) for at in groups]


def _row(
    at: _Line, groups: Mapping[_Line, Mapping[int, Summary]], first: tuple[str, str], cluster: SimCluster
) -> Row:
    scale, policy, fleet = at
    by_seed, compared_to = groups[at], groups[scale, *first]
    figures, against = {}, {}
    for name, figure in FIGURES.items():
        values = {seed: v for seed, s in by_seed.items() if (v := figure.of(s, cluster)) is not None}
        if not values:
            continue
        figures[name] = estimate(list(values.values()))
        if (policy, fleet) != first:
            others = {seed: figure.of(compared_to[seed], cluster) or 0.0 for seed in values}
            against[name] = estimate([value - others[seed] for seed, value in values.items()])
    refused: dict[str, float] = {}
    for summary in by_seed.values():
        for code, count in summary.refused.items():
            refused[code] = refused.get(code, 0.0) + count / len(by_seed)
    requests = next(iter(by_seed.values())).requests
    return Row(policy, scale, requests, figures, dict(sorted(refused.items())), against, fleet)


def shown(value: float, unit: Unit) -> str:
    """A formatted value."""
    if math.isnan(value):
        return "-"
    match unit:
        case Unit.SHARE:
            return f"{value:.1%}"
        case Unit.SECONDS:
            return _seconds(value)
        case Unit.RATIO:
            return f"{value:,.2f}"
        case Unit.COUNT | Unit.MONEY:
            return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:,.2f}"


def _seconds(value: float) -> str:
    """Three significant digits: `318 ms`, `1.24 s`, `12.4 s`."""
    size = abs(value)
    if size < 0.9995:
        thousandths = value * 1000
        return f"{thousandths:,.0f} ms" if size >= 0.0995 or value == 0 else f"{thousandths:.3g} ms"
    return f"{value:,.0f} s" if size >= 99.95 else f"{value:.3g} s"


def shown_distance(value: float, unit: Unit) -> str:
    """A difference: as `shown`, but shares in percentage points."""
    return f"{value * 100:.1f} pp" if unit is Unit.SHARE else shown(value, unit)


def shown_difference(value: float, unit: Unit) -> str:
    """The same with its sign."""
    text = shown_distance(value, unit)
    return f"+{text}" if value > 0 else text
