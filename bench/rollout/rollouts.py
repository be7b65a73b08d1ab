"""Rollouts of healthy and of harmful revisions, each judged by ours and by the others on the same stream."""

from statistics import median
from typing import Final, NamedTuple

import numpy as np
from rivals import STRICT, WIDE, Call, counter, minutes
from rivals import judge as kayenta
from streams import BATCH_S, Scenario, batches

from forebay.core.rollout.judging import judge
from forebay.core.rollout.observing import begin, observe
from forebay.core.rollout.values import Decision, Rate, Rules, Score, Time

RPS: Final = 10.0
SHARE: Final = 0.05
LAST_MIN: Final = 180
RULES: Final = Rules((Rate("errors"), Time("ttft"), Score("quality", drop=0.05)))
FINER: Final = Rules((Rate("errors"), Time("ttft", ratio=1.02), Score("quality", drop=0.05)))
"""For those who mind a tenth."""
OURS: Final = "forebay"
HEALTHY: Final = {
    "as good": Scenario(),
    "as good, other prompts": Scenario(mix=(0.1, 0.2, 0.3, 0.4)),
    "as good, load wanders, slow spells": Scenario(load=0.3, spells=True),
}
HARMFUL: Final = {
    "2 % errors": Scenario(errors=0.02),
    "+50 % TTFT": Scenario(latency=1.5),
    "+10 % TTFT (1.02 tolerated)": Scenario(latency=1.1),
    "one answer of ten takes 5 times as long": Scenario(tail=5.0),
    "quality -10 points": Scenario(quality=0.1),
}
POWER: Final = {
    "TTFT": [(f"+{round(100 * more)} %", Scenario(latency=1 + more)) for more in (0.05, 0.2, 0.3, 1.0)],
    "errors": [(f"{100 * share:g} %", Scenario(errors=share)) for share in (0.01, 0.05, 0.2, 1.0)],
    "quality": [(f"-{round(100 * less)} points", Scenario(quality=less)) for less in (0.07, 0.2, 0.4)],
}
"""Of ours, with FINER."""


class Tally(NamedTuple):
    """Of many rollouts under one judge."""

    rollouts: int
    rolled_back: int
    promoted: int
    minutes: float
    """Median until rollback if the canary is harmful, until promotion if not; inf: fewer than half got there."""
    minutes_90: float
    """The same of nine of ten."""


def one(scenario: Scenario, rules: Rules, seed: int, with_rivals: bool) -> dict[str, Call]:
    """The same requests for all judges."""
    rng = np.random.default_rng(seed)
    stream = []
    found = {}
    state = begin(rules)
    for index, batch in enumerate(batches(rng, scenario, RPS, SHARE, LAST_MIN * 60), 1):
        stream.append(batch)
        if OURS in found:
            continue
        state = observe(rules, state, batch.observations())
        decision = judge(rules, state).decision
        if decision is not Decision.INCONCLUSIVE:
            rollback = decision is Decision.ROLLBACK
            found[OURS] = Call(rollback, not rollback, index * BATCH_S / 60)
            if not with_rivals:
                return found
    found.setdefault(OURS, Call(False, False, LAST_MIN))
    if with_rivals:
        canary, baseline = minutes(stream, rng)
        found["counter, 1 failed check (Argo)"] = counter(canary, STRICT, 0, 30)
        found["counter, 5 failed checks (Flagger)"] = counter(canary, STRICT, 4, 30)
        found["the same, wider thresholds"] = counter(canary, WIDE, 4, 30)
        found["Mann-Whitney (Kayenta)"] = kayenta(canary, baseline, LAST_MIN)
    return found


def tally(calls: list[Call], harmful: bool) -> Tally:
    """Counted."""
    right = [call.minutes for call in calls if (call.rollback if harmful else call.promoted)]
    times = sorted(right) + [float("inf")] * (len(calls) - len(right))
    rolled_back, promoted = sum(call.rollback for call in calls), sum(call.promoted for call in calls)
    return Tally(len(calls), rolled_back, promoted, median(times), times[int(0.9 * len(times))])
