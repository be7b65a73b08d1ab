"""Polls gateways for load pressure, and takes the difference to the last time all of them responded."""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from forebay.core.pressure import Pressure, TrafficCounters, difference, sum_over_gateways
from forebay.core.reconcile import ObservedUnit

SLACK_S: Final = 1.0
"""The tolerance in the reported age of a gateway that was started since the last poll."""


class PressureSource(Protocol):
    """Polls gateways; implemented by `control.probe.Prober`."""

    async def pressures(self, units: Iterable[ObservedUnit]) -> dict[str, Pressure]:
        """The responses of those that respond, by slot."""


class Collected(NamedTuple):
    """The load within `since_s` of the models that every gateway knows, and what is queued now."""

    since_s: float
    models: Mapping[str, TrafficCounters]


class Collector:
    """Keeps the last counts of each gateway. If one is silent, the load is unknown, and is included in the next
    result."""

    def __init__(self) -> None:
        self._before: dict[str, Pressure] = {}
        self._at: float | None = None

    async def collect(
        self, source: PressureSource, units: Iterable[ObservedUnit], gateways: Collection[str]
    ) -> Collected | None:
        """The load since the last complete poll; None: unknown. `gateways`: slots that have to respond."""
        found = await source.pressures(units)
        if not gateways or any(slot not in found for slot in gateways):
            return None
        now = asyncio.get_running_loop().time()
        at, before = self._at, self._before
        self._at, self._before = now, found
        if at is None or now <= at:
            return None
        grown: dict[str, list[TrafficCounters]] = {}
        for slot, pressure in sorted(found.items()):
            for name, each in pressure.models.items():
                grown.setdefault(name, []).append(
                    difference(_start(before.get(slot), pressure, name, now - at), each)
                )
        known = {name for slot in gateways for name in found[slot].models}
        everywhere = {name for name in known if all(name in found[slot].models for slot in gateways)}
        return Collected(now - at, {name: sum_over_gateways(grown[name]) for name in sorted(everywhere)})


def _start(before: Pressure | None, now: Pressure, model: str, since_s: float) -> TrafficCounters:
    """A gateway's counts at the beginning of the interval; its current ones if those are unknown."""
    if before is not None and before.instance == now.instance:
        return before.models.get(model, TrafficCounters())
    return TrafficCounters() if now.age_s <= since_s + SLACK_S else now.models[model]
