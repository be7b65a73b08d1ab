"""Asks gateways what came to them, and takes the difference to the last time that all of them answered."""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from forebay.core.pressure import Pressed, Pressure, since, total
from forebay.core.reconcile import SeenUnit

SLACK_S: Final = 1.0
"""A gateway that has started since the last look says so at most this much later."""


class Asker(Protocol):
    """Reaches gateways: `control.probe.Prober` does."""

    async def pressures(self, units: Iterable[SeenUnit]) -> dict[str, Pressure]:
        """The answers of those that give one, by slot."""


class Collected(NamedTuple):
    """What came within `since_s` to the models that every gateway knows, and what waits now."""

    since_s: float
    models: Mapping[str, Pressed]


class Collector:
    """Remembers what each gateway has said. What one does not say is unknown, for all of them, and is made up for."""

    def __init__(self) -> None:
        self._before: dict[str, Pressure] = {}
        self._at: float | None = None

    async def collect(self, asker: Asker, units: Iterable[SeenUnit], gateways: Collection[str]) -> Collected | None:
        """What has come since the last good answer; None: not known. `gateways`: slots that have to answer."""
        found = await asker.pressures(units)
        if not gateways or any(slot not in found for slot in gateways):
            return None
        now = asyncio.get_running_loop().time()
        at, before = self._at, self._before
        self._at, self._before = now, found
        if at is None or now <= at:
            return None
        grown: dict[str, list[Pressed]] = {}
        for slot, pressure in sorted(found.items()):
            for name, each in pressure.models.items():
                grown.setdefault(name, []).append(since(_start(before.get(slot), pressure, name, now - at), each))
        known = {name for slot in gateways for name in found[slot].models}
        everywhere = {name for name in known if all(name in found[slot].models for slot in gateways)}
        return Collected(now - at, {name: total(grown[name]) for name in sorted(everywhere)})


def _start(before: Pressure | None, now: Pressure, model: str, since_s: float) -> Pressed:
    """What a gateway had counted at the beginning of the while; its own count if that is not known."""
    if before is not None and before.instance == now.instance:
        return before.models.get(model, Pressed())
    return Pressed() if now.age_s <= since_s + SLACK_S else now.models[model]
