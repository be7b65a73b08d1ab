"""llm-d's scaling on latencies: how close the p90 of TTFT and of time per token are to the objectives.

Source: llm-d's SLO-aware autoscaling (the saturation score and its HPA behaviour), as published in its documentation.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from forebay.core.scaling.rules.behaviour import Behaviour, Limit, Past, held
from forebay.core.scaling.rules.window import Sample, Samples, added, mean

WINDOW_S: Final = 45.0
SCORE_MAX: Final = 2.0
UP: Final = 0.55
DOWN: Final = 0.40
BEHAVIOUR: Final = Behaviour(30.0, 180.0, (Limit(0, 1.0, 60.0), Limit(4, 0.0, 60.0)), (Limit(1, 0.0, 120.0),))


@dataclass(frozen=True, slots=True)
class State:
    """Its state."""

    samples: Samples = ()
    past: Past = field(default_factory=Past)


def score(ttft_s: float | None, tpot_s: float | None, ttft_max_s: float, tpot_max_s: float) -> float:
    """The worse of both p90, as shares of the objectives, at most `SCORE_MAX`; unknown values count 0."""
    return min(max((ttft_s or 0.0) / ttft_max_s, (tpot_s or 0.0) / tpot_max_s), SCORE_MAX)


def wanted(mean_score: float, ready: int, current: int) -> int:
    """n + ⌈n·(s·c/0.55 - 1)⌉ above 0.55, with c the share that is ready; n - ⌊n·(1 - s/0.40)⌋ below 0.40."""
    if mean_score > UP:
        credit = ready / current if 0 < ready < current else 1.0
        return max(current, current + math.ceil(current * (mean_score * credit / UP - 1)))
    if mean_score < DOWN:
        return current - math.floor(current * (1 - mean_score / DOWN))
    return current


def step(state: State, *, raw: float, since_s: float, ready: int, current: int, now: float) -> tuple[int, State]:
    """The recommendation; `raw` is the `score` of the last `since_s` seconds."""
    samples = added(state.samples, Sample(now, since_s, raw), WINDOW_S)
    wish = wanted(mean(samples, now, WINDOW_S), ready, current)
    many, past = held(BEHAVIOUR, state.past, wish, current, now)
    return many, State(samples, past)
