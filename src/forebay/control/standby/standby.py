"""The standby pools of a cluster: slots for them in the plan, and routes without the replicas that rest."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from forebay.control.plan import Plan, PlannedModel, slot_of
from forebay.control.rolling.watching import Looked
from forebay.control.standby.chronicle import Chronicle
from forebay.core.availability.measured import Lived, failing
from forebay.core.availability.spares import spares_needed
from forebay.core.availability.standby import coming, resting, serving
from forebay.core.model import ModelRoutes, Replica, ReplicaState, Snapshot
from forebay.core.reconcile import UnitKey
from forebay.obs.clock import wall_s
from forebay.obs.metrics import Metrics

SPARES_MAX: Final = 8
"""No more spares are kept by `auto`."""

KEEP_EVERY_S: Final = 60.0
"""How often it is seen to that files which are to stay in memory are there."""


class Standby:
    """Knows who rests. `note` writes into the journal; the others may be missing.

    `chronicle` writes down what becomes of the models; `keep` has files of models read, and says what came of it.
    """

    def __init__(
        self,
        metrics: Metrics,
        note: Callable[..., None],
        chronicle: Chronicle | None = None,
        keep: Callable[[Plan], Awaitable[Mapping[str, str]]] | None = None,
    ) -> None:
        self.resting: frozenset[UnitKey] = frozenset()
        """Of all models, as gateways were told last."""
        self.chronicle = chronicle
        self._keep = keep
        self._metrics = metrics
        self._note = note
        self._stepped_in: list[str] = []
        """Models of the replicas that were promoted in this round."""
        self._pooled: dict[str, tuple[PlannedModel, int, PlannedModel]] = {}
        """What was asked for, with how many more, and what was made of it: a digest costs as much as a round."""

    @property
    def pools(self) -> dict[str, int]:
        """How many replicas of each model were to rest in the last round."""
        return {name: more for name, (_, more, _) in self._pooled.items()}

    async def run(self, plan: Callable[[], Plan]) -> None:
        """Keep files of models in memory, until cancelled; `plan` is the one of the moment."""
        told: dict[str, str] = {}
        while self._keep is not None:
            try:
                for model, said in (await self._keep(plan())).items():
                    if told.get(model) != said:
                        self._note("cached", f"{model}: {said}")
                        told[model] = said
            except OSError as error:
                self._note("trouble", f"cached: {error}")
            await asyncio.sleep(KEEP_EVERY_S)

    def pooled(self, plan: Plan) -> Plan:
        """The plan with slots for those that rest. The slots that it has are those that serve."""
        models = tuple(self._with_pool(model, plan.version) for model in plan.models)
        return replace(plan, models=models)

    def routed(
        self, models: Iterable[ModelRoutes], plan: Plan, before: Mapping[UnitKey, Replica]
    ) -> tuple[ModelRoutes, ...]:
        """The routes without the replicas that rest or are about to. `before`: those that gateways were told of last.

        Of two revisions of a model the one that is being rolled out has nobody who rests until it serves alone.
        """
        planned = {model.routes.name: model for model in plan.models}
        served, rest, told = serving(before), set[UnitKey](), []
        for each in models:
            model, routes, mine = planned[each.name], each, frozenset[UnitKey]()
            if model.active is not None:
                canary = {slot.id for slot in model.canary}
                stable = tuple(r for r in each.replicas if r.id not in canary)
                mine = resting(stable, model.active, served)
                untold = mine | coming(stable, model.active)
                routes = replace(each, replicas=tuple(r for r in each.replicas if (r.id, r.generation) not in untold))
            for replica in routes.replicas:
                if (replica.id, replica.generation) in self.resting and replica.state is ReplicaState.READY:
                    self._promoted(each.name, replica)
            self._metrics.gauge("standby_replicas", each.name).set(len(mine))
            rest |= mine
            told.append(routes)
        self.resting = frozenset(rest)
        return tuple(told)

    def remember(self, plan: Plan, looked: Looked, told: Snapshot, began: float, now: float) -> None:
        """Write down what a round has found; it `began` then, on the loop's clock. Raises OSError."""
        stepped_in, self._stepped_in = self._stepped_in, []
        if self.chronicle is not None:
            for model in stepped_in:
                self.chronicle.promoted(model, now - began)
            self.chronicle.look(plan, looked, told, now, wall_s())

    def spares(self, model: PlannedModel, had: int = 0) -> int:
        """How many spares a model with `spares: auto` needs by now; `had`: before."""
        lived = self.chronicle.lived(model.routes.name) if self.chronicle is not None else Lived()
        target = model.slo.availability
        needed = len(model.slots) if model.active is None else model.active
        found = spares_needed(needed, failing(lived).replica_up, target, had) if target else 0
        return SPARES_MAX if found is None else min(found, SPARES_MAX)

    def _promoted(self, model: str, replica: Replica) -> None:
        self._metrics.counter("promotions_total", model).inc()
        self._stepped_in.append(model)
        self._note(
            "promoted",
            "was on standby and serves from now on",
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
    """A model with so many slots more, and its spare behind them."""
    base = model.slots[0] if model.slots else model.spare
    if not more or base is None:
        return model
    first = len(model.slots)
    rest = [slot_of(base, index, None, version) for index in range(first, first + more + 1)]
    return replace(
        model, slots=(*model.slots, *rest[:-1]), spare=rest[-1] if model.spare is not None else None, active=first
    )
