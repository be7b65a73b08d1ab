"""Two other ways to judge a canary, written anew from what their projects publish, on figures of each minute.

`counter` is the threshold counter of Flagger (docs.flagger.app, "Metrics Analysis": success rate at least 99 %, a p99
of the duration, checked each minute, 5 failed checks roll back) and of Argo Rollouts (argo-rollouts.readthedocs.io,
"Analysis": failureLimit is 0 unless stated). `judge` is Kayenta's NetflixACAJudge (github.com/spinnaker/kayenta,
"docs/canary-config.md" and MannWhitneyClassifier): a Mann-Whitney test of the minutes' figures of the canary and of a
baseline of its size, with a confidence interval of 98 % for the shift and a tolerance of a quarter of its estimate;
the share of metrics that pass is the score, of which 75 is marginal.
"""

from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from streams import BATCH_S, QUALITY, SIGMA, SPREAD, STRATA, TTFT_S, Drawn

MINUTE: Final = 60 // BATCH_S
Z98: Final = NormalDist().inv_cdf(0.99)
TOLERANCE: Final = 0.25
MARGINAL: Final = 0.75
JUDGED_EVERY: Final = 60
"""Minutes: Kayenta's advice is at least 50 points for each metric."""


class Thresholds(NamedTuple):
    """Of the counter's checks."""

    errors_max: float
    p99_max: float
    """Times the true p99 of the healthy service."""
    quality_less_max: float
    """Below the true quality."""


STRICT: Final = Thresholds(0.01, 1.5, 0.05)
"""The published example for errors, and about what people mind for the others."""
WIDE: Final = Thresholds(0.05, 3.0, 0.22)
"""At 30 requests a minute a healthy canary passes nearly all checks."""


class Minute(NamedTuple):
    """Of one arm. nan without requests."""

    errors: float
    p99_s: float
    mean_s: float
    score: float


class Call(NamedTuple):
    """What a judge did, and after how many minutes."""

    rollback: bool
    promoted: bool
    minutes: float


def minutes(stream: list[Drawn], rng: np.random.Generator) -> tuple[list[Minute], list[Minute]]:
    """Of the canary, and of as many requests of the stable arm."""
    arms: tuple[list[Minute], list[Minute]] = ([], [])
    for begin in range(0, len(stream) - MINUTE + 1, MINUTE):
        whole = [np.concatenate(columns) for columns in zip(*stream[begin : begin + MINUTE], strict=True)]
        canary = whole[0].astype(bool)
        equal = ~canary & (rng.random(len(canary)) < canary.mean() / max(1e-9, 1 - canary.mean()))
        for found, chosen in zip(arms, (canary, equal), strict=True):
            found.append(_minute(whole, chosen))
    return arms


def _minute(whole: list[NDArray[np.float64]], chosen: NDArray[np.bool_]) -> Minute:
    if not chosen.any():
        return Minute(*[float("nan")] * 4)
    errors, ttft_s, score = (whole[index][chosen] for index in (2, 3, 4))
    return Minute(errors.mean(), np.quantile(ttft_s, 0.99), ttft_s.mean(), score.mean())


def true_p99_s() -> float:
    """Of the healthy service: of equal parts of log-normal distributions."""
    low, high = 0.01, 100.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        logs = [(np.log(middle / TTFT_S) - SPREAD * stratum) / SIGMA for stratum in range(STRATA)]
        beyond = 1 - sum(NormalDist().cdf(log) for log in logs) / STRATA
        low, high = (middle, high) if beyond > 0.01 else (low, middle)
    return high


def counter(canary: list[Minute], thresholds: Thresholds, failed_max: int, checks: int) -> Call:
    """Rolls back with more than `failed_max` failed checks, promotes after so many checks that were passed."""
    p99_max_s = thresholds.p99_max * true_p99_s()
    score_min = QUALITY - thresholds.quality_less_max
    failed = passed = 0
    for index, minute in enumerate(canary, 1):
        if np.isnan(minute.errors):
            continue
        good = minute.errors <= thresholds.errors_max and minute.p99_s <= p99_max_s and minute.score >= score_min
        failed, passed = failed + (not good), passed + good
        if failed > failed_max:
            return Call(True, False, index)
        if passed >= checks:
            return Call(False, True, index)
    return Call(False, False, len(canary))


def judge(canary: list[Minute], baseline: list[Minute], last: int) -> Call:
    """Judges each hour all that there is by then; after `last` minutes a score that is not too low promotes."""
    for index in range(JUDGED_EVERY, last + 1, JUDGED_EVERY):
        passed = 0
        for figure, worse in (("errors", 1), ("mean_s", 1), ("score", -1)):
            ours, theirs = (
                np.array([getattr(minute, figure) for minute in arm[:index]]) * worse for arm in (canary, baseline)
            )
            passed += not _higher(ours[~np.isnan(ours)], theirs[~np.isnan(theirs)])
        if passed / 3 < MARGINAL:
            return Call(True, False, index)
    return Call(False, True, last)


def _higher(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> bool:
    differences = np.sort(np.subtract.outer(ours, theirs).ravel())
    several = len(differences)
    deviation = np.sqrt(several * (len(ours) + len(theirs) + 1) / 12)
    lowest = max(0, int(several / 2 - Z98 * deviation))
    estimate = float(np.median(differences))
    return bool(differences[lowest] > TOLERANCE * abs(estimate)) and estimate != 0
