"""Statistics of rollouts: always-valid verdicts on request metrics, and plans that can reach one."""

from forebay.core.rollout.effects import Effect, effects
from forebay.core.rollout.guards import GUARDS, Guard, Harm, Incident, Tripped, tripped
from forebay.core.rollout.judging import judge
from forebay.core.rollout.observing import begin, observe
from forebay.core.rollout.planning import Need, Plan, Refusal, Step, needs, refusal
from forebay.core.rollout.sides import side_of
from forebay.core.rollout.values import (
    Arm,
    Decision,
    Finding,
    Metric,
    Observation,
    Part,
    Rate,
    Rules,
    Score,
    State,
    Time,
    Verdict,
    stratum_of,
)

__all__ = [
    "GUARDS",
    "Arm",
    "Decision",
    "Effect",
    "Finding",
    "Guard",
    "Harm",
    "Incident",
    "Metric",
    "Need",
    "Observation",
    "Part",
    "Plan",
    "Rate",
    "Refusal",
    "Rules",
    "Score",
    "State",
    "Step",
    "Time",
    "Tripped",
    "Verdict",
    "begin",
    "effects",
    "judge",
    "needs",
    "observe",
    "refusal",
    "side_of",
    "stratum_of",
    "tripped",
]
