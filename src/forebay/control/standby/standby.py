"""The standby pools of a cluster: adds slots for them to the plan, and leaves standby replicas out of the routes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from forebay.control.plan import Plan, PlannedModel, slot_of
from forebay.control.rolling.watching import Looked
from forebay.control.standby.history import AvailabilityHistory
from forebay.core.availability.measured import LifetimeSums, failure_times
from forebay.core.availability.spares import spares_needed
from forebay.core.availability.standby import future_standbys, serving, standby_replicas
from forebay.core.model import ModelRoutes, Replica, ReplicaState, Snapshot
from forebay.core.reconcile import UnitKey
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics

SPARES_MAX: Final = 8
"""The most spares that `auto` keeps."""

KEEP_EVERY_S: Final = 60.0
"""How often the caching of model files is refreshed."""


class Standby:
    """Tracks the standby replicas. `note` writes to the journal; the others are optional.

    `history` records the availability of the models; `keep` caches model files, and returns the results.
    """

    def __init__(
        self,
        metrics: Metrics,
        note: Callable[..., None],
        history: AvailabilityHistory | None = None,
        keep: Callable[[Plan], Awaitable[Mapping[str, str]]] | None = None,
    ) -> None:
        self.standbys: frozenset[UnitKey] = frozenset()
        """Of all models, as last published to the gateways."""
        self.history = history
        self._keep = keep
        self._metrics = metrics
        self._note = note
        self._stepped_in: list[str] = []
        """Models of the replicas that were promoted in this round."""
        self._pooled: dict[str, tuple[PlannedModel, int, PlannedModel]] = {}
        """The input model, the pool size, and the result, cached: a digest costs as much as a round."""

    @property
    def pools(self) -> dict[str, int]:
        """The standby pool sizes of the last round, by model."""
        return {name: more for name, (_, more, _) in self._pooled.items()}

    async def run(self, plan: Callable[[], Plan]) -> None:
        """Keep model files cached, until cancelled; `plan` returns the current plan."""
        noted: dict[str, str] = {}
        while self._keep is not None:
            try:
                for model, result in (await self._keep(plan())).items():
                    if noted.get(model) != result:
                        self._note("cached", f"{model}: {result}")
                        noted[model] = result
            except OSError as error:
                self._note("trouble", f"cached: {error}")
            await asyncio.sleep(KEEP_EVERY_S)

    def pooled(self, plan: Plan) -> Plan:
        """The plan with additional slots for standby replicas. Its existing slots are those that serve."""
        models = tuple(self._with_pool(model, plan.version) for model in plan.models)
        return replace(plan, models=models)

    def routed(
        self, models: Iterable[ModelRoutes], plan: Plan, before: Mapping[UnitKey, Replica]
    ) -> tuple[ModelRoutes, ...]:
        """The routes without replicas that are on standby or about to be. `before`: the replicas last published.

        While a revision is being rolled out, it has no standby replicas until it serves alone.
        """
        planned = {model.routes.name: model for model in plan.models}
        served, on_standby, published = serving(before), set[UnitKey](), []
        for each in models:
            model, routes, mine = planned[each.name], each, frozenset[UnitKey]()
            if model.active is not None:
                canary = {slot.id for slot in model.canary}
                stable = tuple(r for r in each.replicas if r.id not in canary)
                mine = standby_replicas(stable, model.active, served)
                hidden = mine | future_standbys(stable, model.active)
                routes = replace(each, replicas=tuple(r for r in each.replicas if (r.id, r.generation) not in hidden))
            for replica in routes.replicas:
                if (replica.id, replica.generation) in self.standbys and replica.state is ReplicaState.READY:
                    self._promoted(each.name, replica)
            self._metrics.gauge("standby_replicas", each.name).set(len(mine))
            on_standby |= mine
            published.append(routes)
        self.standbys = frozenset(on_standby)
        return tuple(published)

    def remember(self, plan: Plan, looked: Looked, published: Snapshot, began: float, now: float) -> None:
        """Record the result of a round, and the snapshot published in it. Raises OSError.

        `began`, `now`: when the round began, and the current time, on the loop's clock.
        """
        stepped_in, self._stepped_in = self._stepped_in, []
        if self.history is not None:
            for model in stepped_in:
                self.history.promoted(model, now - began)
            self.history.record(plan, looked, published, now, wall_s())

    def spares(self, model: PlannedModel, had: int = 0) -> int:
        """How many spares a model with `spares: auto` needs now; `had`: its previous number."""
        lifetimes = self.history.lifetimes(model.routes.name) if self.history is not None else LifetimeSums()
        target = model.slo.availability
        needed = len(model.slots) if model.active is None else model.active
        found = spares_needed(needed, failure_times(lifetimes).replica_up, target, had) if target else 0
        return SPARES_MAX if found is None else min(found, SPARES_MAX)

    def _promoted(self, model: str, replica: Replica) -> None:
        self._metrics.counter("promotions_total", model).inc()
        self._stepped_in.append(model)
        self._note(
            "promoted",
            "promoted from standby, serves now",
            unit=replica.id,
            generation=replica.generation,
            state=replica.state.value,
        )

    def _with_pool(self, model: PlannedModel, version: str) -> PlannedModel:
        name = model.routes.name
        made = self._pooled.get(name)
        had = made[1] if made is not None else 0
        more = max(model.standby, self.spares(model, had) if model.spares_auto else 0)
        if made is not None and made[0] is model and made[1] == more:
            return made[2]
        pooled = _pooled(model, more, version)
        self._pooled[name] = model, more, pooled
        return pooled


def _pooled(model: PlannedModel, more: int, version: str) -> PlannedModel:
    """A model with that many more slots, followed by its spare."""
    base = model.slots[0] if model.slots else model.spare
    if not more or base is None:
        return model
    first = len(model.slots)
    rest = [slot_of(base, index, None, version) for index in range(first, first + more + 1)]
    return replace(
        model, slots=(*model.slots, *rest[:-1]), spare=rest[-1] if model.spare is not None else None, active=first
    )
