"""Asks units how they are: replicas at `/load`, gateways at `/livez` of their own port. Never waits long."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec

from forebay.core.deploy.samples import Observed
from forebay.core.model import Endpoint, LoadReport
from forebay.core.pressure import Pressure
from forebay.core.reconcile import Answer, Answered, Kind, SeenUnit, Silent, UnitKey
from forebay.core.tenancy import Demand
from forebay.net.fetching import NoAnswer, fetch_once
from forebay.wire.documents import UNREADABLE

TIMEOUT_S = 1.0
AT_ONCE_MAX = 32
D = TypeVar("D")
BODY_BYTES_MAX = 8 * 1_048_576
"""Of any answer. The largest ones are a gateway's samples: 1,000 of them, and 32 pairs of texts."""


class Prober:
    """Each question has a connection of its own. `peers` is where gateways write down their own ports."""

    def __init__(self, peers: Path) -> None:
        self._peers = peers
        self._room = asyncio.Semaphore(AT_ONCE_MAX)

    async def ask(self, units: Iterable[SeenUnit]) -> dict[UnitKey, Answer]:
        """The answers of all units that have said where they listen; all together take little more than a second."""
        listening = [unit for unit in units if unit.alive and unit.endpoint]
        async with asyncio.TaskGroup() as tasks:
            asked = [(unit.key, tasks.create_task(self._ask_one(unit))) for unit in listening]
        return {key: task.result() for key, task in asked}

    async def demands(self, units: Iterable[SeenUnit]) -> dict[str, Demand]:
        """What each gateway that answers has use for, by its slot; asked at once, in little more than a second."""
        listening = [unit for unit in units if unit.alive and unit.endpoint and unit.kind is Kind.GATEWAY]
        async with asyncio.TaskGroup() as tasks:
            asked = [(unit.slot, tasks.create_task(self._demand(unit))) for unit in listening]
        return {slot: demand for slot, task in asked if (demand := task.result()) is not None}

    async def observations(
        self, units: Iterable[SeenUnit], cursors: Mapping[str, tuple[str, int]]
    ) -> dict[str, Observed]:
        """What gateways have seen of rollouts, by their slot, of each what is new since its instance and number in
        `cursors`; nothing of a gateway that does not answer. Takes little more than a second."""
        listening = [unit for unit in units if unit.alive and unit.endpoint and unit.kind is Kind.GATEWAY]
        async with asyncio.TaskGroup() as tasks:
            asked = [
                (unit.slot, tasks.create_task(self._observed(unit, *cursors.get(unit.slot, ("", 0)))))
                for unit in listening
            ]
        return {slot: observed for slot, task in asked if (observed := task.result()) is not None}

    async def pressures(self, units: Iterable[SeenUnit]) -> dict[str, Pressure]:
        """What each gateway that answers was asked for, by its slot; asked at once, in little more than a second."""
        listening = [unit for unit in units if unit.alive and unit.endpoint and unit.kind is Kind.GATEWAY]
        async with asyncio.TaskGroup() as tasks:
            asked = [(unit.slot, tasks.create_task(self._told(unit, "/pressure", Pressure))) for unit in listening]
        return {slot: pressure for slot, task in asked if (pressure := task.result()) is not None}

    async def pages(self, units: Iterable[SeenUnit]) -> dict[str, bytes]:
        """The metrics of each gateway that answers, by its slot; asked at once, in little more than a second."""
        listening = [unit for unit in units if unit.alive and unit.endpoint and unit.kind is Kind.GATEWAY]
        async with asyncio.TaskGroup() as tasks:
            asked = [(unit.slot, tasks.create_task(self._page(unit))) for unit in listening]
        return {slot: page for slot, task in asked if (page := task.result()) is not None}

    async def _ask_one(self, unit: SeenUnit) -> Answer:
        endpoint = self._own_port(unit) or unit.endpoint
        assert endpoint is not None
        path = "/livez" if unit.kind is Kind.GATEWAY else "/load"
        body = await self._get(endpoint, path)
        if isinstance(body, NoAnswer):
            return Silent(body.why)
        if unit.kind is Kind.GATEWAY:
            return Answered()
        try:
            report = msgspec.json.decode(body, type=LoadReport)
        except UNREADABLE as error:
            return Silent(f"its load report cannot be read: {error}")
        if (report.replica, report.generation) != unit.key:
            return Silent(f"{report.replica} generation {report.generation} answers at its address")
        return Answered(report)

    async def _demand(self, unit: SeenUnit) -> Demand | None:
        return await self._told(unit, "/demand", Demand)

    async def _observed(self, unit: SeenUnit, instance: str, after: int) -> Observed | None:
        return await self._told(unit, f"/observations?after={after}&instance={quote(instance)}", Observed)

    async def _told(self, unit: SeenUnit, path: str, document: type[D]) -> D | None:
        """What a gateway says at its own port. The public one knows nothing of it, and counts who asks there."""
        endpoint = self._own_port(unit)
        if endpoint is None:
            return None
        body = await self._get(endpoint, path)
        try:
            return None if isinstance(body, NoAnswer) else msgspec.json.decode(body, type=document)
        except UNREADABLE:
            return None

    async def _page(self, unit: SeenUnit) -> bytes | None:
        endpoint = self._own_port(unit)
        if endpoint is None:
            return None
        body = await self._get(endpoint, "/metrics")
        return None if isinstance(body, NoAnswer) else body

    async def _get(self, endpoint: Endpoint, target: str) -> bytes | NoAnswer:
        async with self._room:
            return await fetch_once(endpoint.host, endpoint.port, target.encode(), TIMEOUT_S, BODY_BYTES_MAX)

    def _own_port(self, unit: SeenUnit) -> Endpoint | None:
        """Of a gateway the port that it shares with no other process; None: it has not told yet."""
        if unit.kind is not Kind.GATEWAY:
            return unit.endpoint
        try:
            own = msgspec.json.decode((self._peers / f"{unit.slot}.json").read_bytes(), type=Endpoint)
        except (OSError, *UNREADABLE):
            return None
        return own if own.pid == unit.pid else None
