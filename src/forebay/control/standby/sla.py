"""The SLA report: the expected availability of each model, and what was delivered in a period."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from forebay.control.plan import Plan, PlannedModel
from forebay.control.standby.history import Day
from forebay.control.standby.standby import Standby
from forebay.core.availability.budget import Budget, ObjectiveResult, Requests, budget
from forebay.core.availability.history import AvailabilitySums, Gap, Incident, gaps
from forebay.core.availability.measured import LifetimeSums, failure_times, mtbf_at_least_s
from forebay.core.availability.spares import estimate_availability, spares_needed
from forebay.core.cluster import Slo

INCIDENTS_MAX: Final = 100
"""Most incidents in a response: the newest."""
GATEWAYS_S: Final = 0.3
"""Gateways check for a new snapshot four times a second, and poll a replica's load before using it."""
SWITCH_S: Final = 0.2
"""The assumed time until gateways learn of a stand-in, while none has been measured."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model's requests as recorded by gateways."""

    requests: Requests
    kept: tuple[ObjectiveResult, ...] = ()


Delivered = Callable[[float, float, Mapping[str, Slo]], Mapping[str, Served]]
"""The requests between two times (seconds since the epoch), by model. Blocks."""


@dataclass(frozen=True, slots=True)
class PromiseDocument:
    """The estimated availability of a model's replicas, and the figures behind it. Shares are of time."""

    serve: int
    spares: int
    """Replicas on standby."""
    spares_needed: int | None
    """The fewest that meet the target; null: there is no target, or no number does."""
    mtbf_s: float
    """Mean time between failures of a replica, from the prior and observations."""
    mttr_s: float
    """Mean time until a failed replica is ready again."""
    replica_s: float
    """Total observed ready time of replicas."""
    failures: int
    repairs: int
    mtbf_at_least_s: float
    """From observations alone, with 95 % confidence."""
    replica_up: float
    enough: float
    """The share in which all serving replicas are up."""
    any: float
    """The share in which at least one is up."""
    switching: float
    full: float
    """The share in which all serve: `enough` less the time in which a spare steps in."""
    switch_s: float
    """The time until a spare has stepped in."""
    promotions: int
    """How often that was measured; 0: it is the default."""
    start_s: float | None
    """Of a replica, from being placed to being ready; null: not measured yet."""
    failure_costs: str
    update_costs: str


@dataclass(frozen=True, slots=True)
class ModelSla:
    """The SLA of a model. Sums are in seconds of the period; `target`: null if there is none."""

    name: str
    target: float | None
    promise: PromiseDocument
    known_s: float
    unknown_s: float
    up_s: float
    down_s: float
    full_s: float
    availability: float | None
    """The share of the known time; null: none is known."""
    gaps: tuple[Gap, ...]
    requests: Requests | None
    """Null: there are no records."""
    success: float | None
    budget: Budget | None
    kept: tuple[ObjectiveResult, ...]
    incidents: tuple[Incident, ...]


@dataclass(frozen=True, slots=True)
class Sla:
    """The response of `/v1/sla`. Times: seconds since the epoch."""

    since: float
    until: float
    models: tuple[ModelSla, ...]
    incidents: tuple[Incident, ...] = field(default=())
    """Incidents of no model."""
    incidents_more: int = 0
    """Incidents that were not kept."""


def make_sla(
    plan: Plan, standby: Standby, past: Day, served: Mapping[str, Served], period: tuple[float, float]
) -> Sla:
    """The report on a period: its start and end, in seconds since the epoch."""
    models = tuple(_model(model, standby, past, served.get(model.routes.name), period) for model in plan.models)
    others = [each for each in past.incidents if not each.model][-INCIDENTS_MAX:]
    return Sla(*period, models, tuple(others), past.incidents_more)


def _model(
    model: PlannedModel, standby: Standby, past: Day, served: Served | None, period: tuple[float, float]
) -> ModelSla:
    name, (since, until) = model.routes.name, period
    hours, target = past.models.get(name, {}), model.slo.availability
    seen = sum(hours.values(), AvailabilitySums())
    known_s = min(seen.known_s, until - since)
    requests = served.requests if served else None
    lifetimes = standby.history.lifetimes(name) if standby.history else LifetimeSums()
    return ModelSla(
        name=name,
        target=target,
        promise=_promise(model, lifetimes),
        known_s=known_s,
        unknown_s=until - since - known_s,
        up_s=seen.up_s,
        down_s=seen.down_s,
        full_s=seen.full_s,
        availability=seen.up_s / seen.known_s if seen.known_s else None,
        gaps=tuple(gaps({hour: each.known_s for hour, each in hours.items()}, since, until)),
        requests=requests,
        success=requests.share if requests else None,
        budget=budget(target, until - since, seen, requests or Requests(since, until)) if target else None,
        kept=served.kept if served else (),
        incidents=tuple([each for each in past.incidents if each.model == name][-INCIDENTS_MAX:]),
    )


def _promise(model: PlannedModel, lifetimes: LifetimeSums) -> PromiseDocument:
    serve = len(model.slots) if model.active is None else model.active
    spares = max(0, len(model.slots) - serve)
    fails, target = failure_times(lifetimes), model.slo.availability
    switch_s = GATEWAYS_S + (lifetimes.promotion_s / lifetimes.promotions if lifetimes.promotions else SWITCH_S)
    estimate = estimate_availability(serve, spares, fails, switch_s)
    start_s = lifetimes.start_s / lifetimes.starts if lifetimes.starts else None
    return PromiseDocument(
        serve=serve,
        spares=spares,
        spares_needed=spares_needed(serve, fails.replica_up, target) if target else None,
        mtbf_s=fails.mtbf_s,
        mttr_s=fails.mttr_s,
        replica_s=lifetimes.replica_s,
        failures=lifetimes.failures,
        repairs=lifetimes.repairs,
        mtbf_at_least_s=mtbf_at_least_s(lifetimes),
        replica_up=fails.replica_up,
        enough=estimate.enough,
        any=estimate.any,
        switching=estimate.switching,
        full=estimate.full,
        switch_s=switch_s,
        promotions=lifetimes.promotions,
        start_s=start_s,
        failure_costs=_failure_costs(serve, spares, switch_s, start_s),
        update_costs=_update_costs(serve, spares),
    )


def _failure_costs(serve: int, spares: int, switch_s: float, start_s: float | None) -> str:
    back = "as long as a replica takes to start" if start_s is None else f"about {start_s:.1f} s"
    if not serve:
        return "nothing: no replica is to serve now"
    if spares:
        return f"one of {serve} for about {switch_s:.1f} s, until a spare steps in"
    if serve == 1:
        return f"everything for {back}; requests wait, as long as `queue_timeout_s` lets them"
    return f"one of {serve} for {back}"


def _update_costs(serve: int, spares: int) -> str:
    if spares or serve > 1:
        return "nothing: replicas are replaced one after the other, and another one stands in"
    return "nothing by `forebay deploy`; another cluster file lets requests wait until the new replica is ready"
