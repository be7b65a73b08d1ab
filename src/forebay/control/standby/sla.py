"""What the present set-up can promise of each model, and what a period has delivered, as one document."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from forebay.control.plan import Plan, PlannedModel
from forebay.control.standby.chronicle import Day
from forebay.control.standby.standby import Standby
from forebay.core.availability.budget import Budget, Kept, Requests, budget
from forebay.core.availability.history import Gap, Incident, Stretch, gaps
from forebay.core.availability.measured import Lived, failing, mtbf_at_least_s
from forebay.core.availability.spares import promise, spares_needed
from forebay.core.cluster import Slo

INCIDENTS_MAX: Final = 100
"""Most incidents of an answer: the newest."""
GATEWAYS_S: Final = 0.3
"""Gateways look for news four times a second, and ask a replica for its load before they use it."""
SWITCH_S: Final = 0.2
"""Until gateways are told of a stand-in, as long as none was ever needed."""


@dataclass(frozen=True, slots=True)
class Served:
    """What gateways have written down of a model's requests."""

    requests: Requests
    kept: tuple[Kept, ...] = ()


Delivered = Callable[[float, float, Mapping[str, Slo]], Mapping[str, Served]]
"""What became of requests between two times (seconds since the epoch), by model. Blocks."""


@dataclass(frozen=True, slots=True)
class PromiseDocument:
    """What the replicas of a model can promise, and the figures that say so. Shares are of time."""

    serve: int
    spares: int
    """Replicas that rest, ready."""
    spares_needed: int | None
    """The fewest that keep the promise; null: nothing is promised, or no number does."""
    mtbf_s: float
    """Of a replica: mean time between failures, by the prior and what was seen."""
    mttr_s: float
    """Mean time until a failed replica is ready again."""
    replica_s: float
    """For so long replicas were seen ready."""
    failures: int
    repairs: int
    mtbf_at_least_s: float
    """By what was seen alone, with 95 % confidence."""
    replica_up: float
    enough: float
    """All that are to serve are up."""
    any: float
    """One is."""
    switching: float
    full: float
    """All serve: `enough` less the time in which a spare steps in."""
    switch_s: float
    """Until a spare has stepped in."""
    promotions: int
    """Times that this was measured; 0: it is what is usual."""
    start_s: float | None
    """Of a replica from being placed to being ready; null: not measured yet."""
    failure_costs: str
    update_costs: str


@dataclass(frozen=True, slots=True)
class ModelSla:
    """A model. Sums in seconds, of the period; `target`: null if nothing is promised."""

    name: str
    target: float | None
    promise: PromiseDocument
    known_s: float
    unknown_s: float
    up_s: float
    down_s: float
    full_s: float
    availability: float | None
    """Of the time that is known; null: nothing is."""
    gaps: tuple[Gap, ...]
    requests: Requests | None
    """Null: nothing is written down of any."""
    success: float | None
    budget: Budget | None
    kept: tuple[Kept, ...]
    incidents: tuple[Incident, ...]


@dataclass(frozen=True, slots=True)
class Sla:
    """What `/v1/sla` answers. Times: seconds since the epoch."""

    since: float
    until: float
    models: tuple[ModelSla, ...]
    incidents: tuple[Incident, ...] = field(default=())
    """Those of no model."""
    incidents_more: int = 0
    """Incidents that were not kept."""


def make_sla(
    plan: Plan, standby: Standby, past: Day, served: Mapping[str, Served], period: tuple[float, float]
) -> Sla:
    """The document, of what was written down in a period: since when and until, seconds since the epoch."""
    models = tuple(_model(model, standby, past, served.get(model.routes.name), period) for model in plan.models)
    others = [each for each in past.incidents if not each.model][-INCIDENTS_MAX:]
    return Sla(*period, models, tuple(others), past.incidents_more)


def _model(
    model: PlannedModel, standby: Standby, past: Day, served: Served | None, period: tuple[float, float]
) -> ModelSla:
    name, (since, until) = model.routes.name, period
    hours, target = past.models.get(name, {}), model.slo.availability
    seen = sum(hours.values(), Stretch())
    known_s = min(seen.known_s, until - since)
    requests = served.requests if served else None
    lived = standby.chronicle.lived(name) if standby.chronicle else Lived()
    return ModelSla(
        name=name,
        target=target,
        promise=_promise(model, lived),
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


def _promise(model: PlannedModel, lived: Lived) -> PromiseDocument:
    serve = len(model.slots) if model.active is None else model.active
    spares = max(0, len(model.slots) - serve)
    fails, target = failing(lived), model.slo.availability
    switch_s = GATEWAYS_S + (lived.promotion_s / lived.promotions if lived.promotions else SWITCH_S)
    said = promise(serve, spares, fails, switch_s)
    start_s = lived.start_s / lived.starts if lived.starts else None
    return PromiseDocument(
        serve=serve,
        spares=spares,
        spares_needed=spares_needed(serve, fails.replica_up, target) if target else None,
        mtbf_s=fails.mtbf_s,
        mttr_s=fails.mttr_s,
        replica_s=lived.replica_s,
        failures=lived.failures,
        repairs=lived.repairs,
        mtbf_at_least_s=mtbf_at_least_s(lived),
        replica_up=fails.replica_up,
        enough=said.enough,
        any=said.any,
        switching=said.switching,
        full=said.full,
        switch_s=switch_s,
        promotions=lived.promotions,
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
        return "nothing: replicas are replaced one after the other, and somebody stands in"
    return "nothing by `forebay deploy`; another cluster file lets requests wait until the new replica is ready"
