"""Combines what gateways, replicas and control know of a model into the reading for its scaling decision."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from statistics import fmean
from typing import NamedTuple

from forebay.control.scaling.collecting import Collected
from forebay.core.cluster import Slo
from forebay.core.model import LoadReport, ReplicaState
from forebay.core.pressure import TrafficCounters, above, quantile
from forebay.core.reconcile import Kind, ObservedUnit, SlotState, State, UnitKey
from forebay.core.scaling.values import Reading
from forebay.obs.metrics import SECONDS, TOKEN_SECONDS

COMING = (ReplicaState.STARTING, ReplicaState.WARMING, ReplicaState.STOPPED)
"""States of a wanted slot that has no replica yet."""


class Look(NamedTuple):
    """What control has observed in this round."""

    state: State
    units: tuple[ObservedUnit, ...]
    reports: Mapping[UnitKey, LoadReport]
    rolling: Collection[str] = ()
    """Models with an active rollout."""
    standbys: Collection[UnitKey] = ()
    """Ready replicas that get no requests."""
    duty: Mapping[str, float | None] = {}
    """The duty cycle of a model's GPUs."""
    pools: Mapping[str, int] = {}
    """The size of a model's standby pool, besides the replicas that serve."""

    def running(self, model: str) -> int:
        """How many units of the model are running."""
        return sum(unit.alive and unit.kind is Kind.REPLICA and model_of(unit.slot) == model for unit in self.units)


def model_of(slot: str) -> str:
    """The model that a slot belongs to."""
    return slot.rpartition("-")[0]


def make_reading(
    model: str,
    slo: Slo,
    collected: Collected | None,
    look: Look,
    *,
    at: float,
    cold_start_s: float | None,
    gpus: float = 0.0,
) -> Reading | None:
    """The reading of a model at `at`, seconds since the epoch; None: its load is unknown.

    `gpus`: per replica; a fraction for a shared one.
    """
    pressed = collected.models.get(model) if collected is not None else None
    if collected is None or pressed is None:
        return None
    own = [s for s in look.state.slots if model_of(s.id) == model and not _is_standby(s, look.standbys)]
    ready = [s for s in own if s.state is ReplicaState.READY]
    reports = [look.reports[key] for s in ready if (key := (s.id, s.generation)) in look.reports]
    several = len(ready)
    if model in look.rolling and reports:  # two revisions, each with as many as its share of the traffic needs
        sides = Counter(report.revision for report in reports)
        most, several = max(sides.items(), key=lambda side: (side[1], side[0]))
        reports = [report for report in reports if report.revision == most]
    return Reading(
        at=at,
        since_s=collected.since_s,
        ready=several,
        pending=sum(s.state in COMING for s in own),
        arrivals=pressed.arrivals,
        prompt_tokens=pressed.prompt_tokens,
        completions=pressed.completions,
        output_tokens=pressed.output_tokens,
        refused=pressed.refused,
        waiting=pressed.waiting,
        in_flight=pressed.stay_s / collected.since_s,
        backlog_tokens=pressed.waiting_tokens + pressed.queued_tokens,
        kv_use=_mean(r.kv_used_tokens / r.kv_total_tokens for r in reports if r.kv_total_tokens > 0),
        busy=_mean(min(1.0, r.in_flight / r.capacity) for r in reports if r.capacity > 0),
        ttft_s=quantile(SECONDS, pressed.ttft, 0.9),
        tpot_s=quantile(TOKEN_SECONDS, pressed.tpot, 0.9),
        duty=look.duty.get(model),
        cold_start_s=cold_start_s,
        late=_late(pressed, slo),
        predicted_ttft_s=pressed.predicted_ttft_s,
        predicted_tpot_s=pressed.predicted_tpot_s,
        gpus=gpus,
    )


def _is_standby(s: SlotState, standbys: Collection[UnitKey]) -> bool:
    return (s.id, s.generation) in standbys


def _late(pressed: TrafficCounters, slo: Slo) -> int | None:
    """How many responses missed an SLO, extrapolated from those with measured times, which are streams.

    With two SLOs the one missed more often counts: both may be missed by the same responses.
    """
    promised = ((slo.ttft_p99_ms, SECONDS, pressed.ttft), (slo.tpot_p99_ms, TOKEN_SECONDS, pressed.tpot))
    shares = [
        above(bounds, counts, ms / 1000) / seen
        for ms, bounds, counts in promised
        if ms is not None and (seen := sum(counts))
    ]
    return round(max(shares) * pressed.completions) if shares else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
