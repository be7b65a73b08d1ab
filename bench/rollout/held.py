"""How often the guarantees are broken: canaries exactly at the tolerance, judged after every observation."""

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
from streams import QUALITY, Drawn, Scenario, batches

from forebay.core.rollout.effects import effects
from forebay.core.rollout.judging import judge
from forebay.core.rollout.observing import begin, observe
from forebay.core.rollout.values import Arm, Metric, Observation, Rate, Rules, Score, State, Time

ALPHA: Final = 0.05
RPS: Final = 10.0
LAST_S: Final = 600
EDGE: Final = Time("ttft", ratio=1.1, tail_ratio=1.1)
PASS: Final = Score("quality", drop=0.02)
Change = Callable[[np.random.Generator, Drawn], Drawn]


class Case(NamedTuple):
    """A canary at the edge of what `metric` tolerates."""

    name: str
    metric: Metric
    scenario: Scenario
    change: Change = lambda rng, batch: batch
    share: float = 0.2
    truth: float = math.nan
    """The effect as `effects` gives it."""


def _base_2_percent(rng: np.random.Generator, batch: Drawn) -> Drawn:
    chance = np.where(batch.canary, 0.04 / 1.02, 0.02)
    return batch._replace(errors=rng.random(len(chance)) < chance)


def _heavy(rng: np.random.Generator, batch: Drawn) -> Drawn:
    log = np.clip(rng.standard_t(2, len(batch.canary)) * 0.5, -10, 10)
    return batch._replace(ttft_s=np.exp(log) * np.where(batch.canary, 1.1, 1.0))


def _rounded(rng: np.random.Generator, batch: Drawn) -> Drawn:
    """To a tenth of a second, of figures whose median is 0.4 s: many are the same."""
    return batch._replace(ttft_s=np.maximum(0.1, np.round(batch.ttft_s, 1)))


def _smooth(rng: np.random.Generator, batch: Drawn) -> Drawn:
    share = np.where(batch.canary, QUALITY - PASS.drop, QUALITY)
    return batch._replace(score=rng.beta(5 * share, 5 * (1 - share)))


CASES: Final = (
    Case("errors, base 2 %", Rate("errors"), Scenario(), _base_2_percent, truth=2.0),
    Case("errors, base 0.1 %, canary at the floor of 0.5 %", Rate("errors"), Scenario(errors=0.005)),
    Case("TTFT, log-normal", EDGE, Scenario(latency=1.1), truth=1.1),
    Case("TTFT, heavy tails (log of Student's t with 2 degrees)", EDGE, Scenario(), _heavy, truth=1.1),
    Case("TTFT, other prompts in the canary", EDGE, Scenario(latency=1.1, mix=(0.1, 0.2, 0.3, 0.4)), truth=1.1),
    Case("TTFT, load that wanders for both", EDGE, Scenario(latency=1.1, load=0.5), truth=1.1),
    Case("TTFT in steps of 0.1 s", Time("ttft", 1.0, tail_ratio=1.0), Scenario(), _rounded),
    Case("TTFT, same median, 1.5 times the spread (centre)", Time("ttft", 1.0, tail=0.0), Scenario(spread=1.5)),
    Case("TTFT, slow spells of each replica", EDGE, Scenario(latency=1.1, spells=True), share=0.05),
    Case("TTFT, slow spells, a 20 % canary on one replica", EDGE, Scenario(latency=1.1, spells=True)),
    Case("TTFT, slow spells and load that wanders", EDGE, Scenario(latency=1.1, spells=True, load=0.3), share=0.05),
    Case("quality, right or wrong", PASS, Scenario(quality=0.02), truth=-0.02),
    Case("quality, smooth scores", PASS, Scenario(), _smooth, truth=-0.02),
    Case("quality, paired", Score("quality", 0.02, paired=True), Scenario(quality=0.02), truth=-0.02),
)


def broken(case: Case, seed: int) -> dict[str, bool]:
    """Whether any part was ever called worse, or fine, and whether an interval ever missed the truth."""
    rules, found = Rules((case.metric,)), {}
    state = begin(rules)
    known: object = None
    for observation in _observations(case, seed):
        state = observe(rules, state, (observation,))
        evidence = _evidence(state)
        if evidence == known:
            continue
        known = evidence
        for part in judge(rules, state).parts:
            found[f"{part.part} worse"] = found.get(f"{part.part} worse", False) or part.worse_p <= ALPHA
            found[f"{part.part} fine"] = found.get(f"{part.part} fine", False) or part.fine_p <= ALPHA
        if not math.isnan(case.truth):
            (effect,) = effects(rules, state, ALPHA)
            found["interval"] = found.get("interval", False) or not effect.low <= case.truth <= effect.high
    return found


def _observations(case: Case, seed: int) -> Iterator[Observation]:
    rng = np.random.default_rng((seed, CASES.index(case)))
    paired = isinstance(case.metric, Score) and case.metric.paired
    for batch in batches(rng, case.scenario, RPS, case.share, LAST_S):
        for observation in case.change(rng, batch).observations():
            if observation.metric != case.metric.name:
                continue
            if not paired:
                yield observation
            elif observation.arm is Arm.CANARY:
                yield observation._replace(value=observation.value - float(rng.random() < QUALITY))


def _evidence(state: State) -> object:
    """What has to change before anything else can."""
    return (
        [(rate.odds, rate.total.canary) for rate in state.rates.values()],
        [time.blocks for time in state.times.values()],
        [score.shift.weight for score in state.scores.values()],
    )
