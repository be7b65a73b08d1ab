"""The rules by name: their inputs and recommendations."""

from dataclasses import dataclass, field, replace

from forebay.core.scaling.rules import apa, hpa, kpa, slo
from forebay.core.scaling.rules.apa import State as ApaState
from forebay.core.scaling.rules.hpa import State as HpaState
from forebay.core.scaling.rules.kpa import State as KpaState
from forebay.core.scaling.rules.slo import State as SloState
from forebay.core.scaling.settings import TARGETS, Policy, Scale, Signal
from forebay.core.scaling.values import Reading


@dataclass(frozen=True, slots=True)
class Rules:
    """The state of all rules."""

    hpa: HpaState = field(default_factory=HpaState)
    kpa: KpaState = field(default_factory=KpaState)
    apa: ApaState = field(default_factory=ApaState)
    slo: SloState = field(default_factory=SloState)


def advise(scale: Scale, rules: Rules, reading: Reading, value: float, current: int) -> tuple[int, str, Rules]:
    """The recommendation of the rule of `scale.policy`, unbounded, and why; `value` is `scale.signal` per replica.

    Raises ValueError for `forebay`, which is not such a rule.
    """
    now, since_s, ready, target = reading.at, reading.since_s, reading.ready, scale.target
    match scale.policy:
        case Policy.HPA:
            many, hpa_ = hpa.step(
                rules.hpa, value=value, target=target, ready=ready, pending=reading.pending, current=current, now=now
            )
            return many, _why(scale, value, target, many), replace(rules, hpa=hpa_)
        case Policy.KPA:
            many, kpa_ = kpa.step(
                rules.kpa, total=value * max(1, ready), target=target, since_s=since_s, ready=ready, now=now
            )
            panic = ", in panic" if kpa_.panic_at is not None else ""
            return many, _why(scale, value, target * kpa.UTILIZATION, many) + panic, replace(rules, kpa=kpa_)
        case Policy.APA:
            many, apa_ = apa.step(
                rules.apa, value=value, target=target, since_s=since_s, ready=ready, current=current, now=now
            )
            return many, _why(scale, value, target, many), replace(rules, apa=apa_)
        case Policy.SLO:
            ttft_max_s, tpot_max_s = scale.ttft_s or TARGETS[Signal.TTFT_S], scale.tpot_s or TARGETS[Signal.TPOT_S]
            raw = slo.score(reading.ttft_s, reading.tpot_s, ttft_max_s, tpot_max_s)
            many, slo_ = slo.step(rules.slo, raw=raw, since_s=since_s, ready=ready, current=current, now=now)
            return many, f"slo says {many}: p90 is at {raw:.0%} of the objective", replace(rules, slo=slo_)
        case _:
            raise ValueError(f"{scale.policy} is not a rule of this table")


def _why(scale: Scale, value: float, held: float, many: int) -> str:
    return f"{scale.policy} says {many}: {scale.signal} is {value:.3g} per ready replica, target {held:.3g}"
