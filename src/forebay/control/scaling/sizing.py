"""Applies replica counts to a plan, cached per size: the digest of a slot costs as much as a whole round."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from forebay.control.plan import Plan, PlannedModel, slot_of
from forebay.core.reconcile import Slot


class Size(NamedTuple):
    """The replica count of a model, and what gateways are told about starts on demand."""

    replicas: int
    on_demand: bool = False
    start_s: float = 0.0


class Sizer:
    """Caches the slots and the last result of each model: the same size gives the same object."""

    def __init__(self) -> None:
        self._slots: dict[str, tuple[Slot, dict[int, Slot]]] = {}
        self._made: dict[str, tuple[PlannedModel, Size, PlannedModel]] = {}

    def sized(self, plan: Plan, sizes: Mapping[str, Size]) -> Plan:
        """The plan with slots 0 to n-1, and n as the spare, for each model that has a size."""
        models = tuple(
            self._model(model, size, plan.version) if (size := sizes.get(model.routes.name)) else model
            for model in plan.models
        )
        names = {model.routes.name for model in plan.models}
        for gone in sorted(self._made.keys() - names):
            del self._made[gone]
            self._slots.pop(gone, None)
        return plan if models == plan.models else replace(plan, models=models)

    def _model(self, model: PlannedModel, size: Size, version: str) -> PlannedModel:
        name, several = model.routes.name, size.replicas
        made = self._made.get(name)
        if made is not None and made[0] is model and made[1] == size:
            return made[2]
        routes = replace(model.routes, on_demand=size.on_demand, start_s=size.start_s)
        slots, spare = model.slots, model.spare
        if several != len(slots):
            slots = tuple(self._slot(model, index, version) for index in range(several))
            spare = self._slot(model, several, version) if spare is not None else None
        changed = replace(model, routes=routes, slots=slots, spare=spare)
        self._made[name] = model, size, changed
        return changed

    def _slot(self, model: PlannedModel, index: int, version: str) -> Slot:
        own = model.slots if model.spare is None else (*model.slots, model.spare)
        if index < len(own):
            return own[index]
        base, made = self._slots.get(model.routes.name) or (own[0], dict[int, Slot]())
        if base is not own[0]:
            base, made = own[0], {}
        self._slots[model.routes.name] = base, made
        if index not in made:
            made[index] = slot_of(base, index, None, version)
        return made[index]
