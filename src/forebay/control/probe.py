"""Polls units: replicas at `/load`, gateways at `/livez` of their private port. Times out after about a second."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec

from forebay.core.deploy.samples import Observed
from forebay.core.model import Endpoint, LoadReport
from forebay.core.pressure import Pressure
from forebay.core.reconcile import Answer, Answered, Kind, ObservedUnit, Silent, UnitKey
from forebay.core.tenancy import Demand
from forebay.net.fetching import NoAnswer, fetch_once
from forebay.wire.documents import UNREADABLE

TIMEOUT_S = 1.0
AT_ONCE_MAX = 32
D = TypeVar("D")
BODY_BYTES_MAX = 8 * 1_048_576
"""Of any response. The largest are a gateway's samples: 1,000 of them, and 32 pairs of texts."""


class Prober:
    """Uses a connection per request. `peers` is where gateways publish their private ports."""

    trouble = ""
    """Why this process could not ask all units the last time; empty: it could."""

    def __init__(self, peers: Path) -> None:
        self._peers = peers
        self._room = asyncio.Semaphore(AT_ONCE_MAX)

    async def ask(self, units: Iterable[ObservedUnit]) -> dict[UnitKey, Answer]:
        """Poll all units that have published an endpoint, concurrently; takes little more than a second.

        Nothing is known of those that this process had no file descriptor to ask: they are left out.
        """
        self.trouble = ""
        listening = [unit for unit in units if unit.alive and unit.endpoint]
        async with asyncio.TaskGroup() as tasks:
            asked = [(unit.key, tasks.create_task(self._ask_one(unit))) for unit in listening]
        return {key: answer for key, task in asked if (answer := task.result()) is not None}

    async def demands(self, units: Iterable[ObservedUnit]) -> dict[str, Demand]:
        """The demand of each gateway that responds, by slot; polled concurrently, in little more than a second."""
        listening = [unit for unit in units if unit.alive and unit.endpoint and unit.kind is Kind.GATEWAY]
        async with asyncio.TaskGroup() as tasks:
            asked = [(unit.slot, tasks.create_task(self._demand(unit))) for unit in listening]
        return {slot: demand for slot, task in asked if (demand := task.result()) is not None}

    async def observations(
        self, units: Iterable[ObservedUnit], cursors: Mapping[str, tuple[str, int]]
    ) -> dict[str, Observed]:
        """The rollout samples of each gateway that responds, by slot: what is new since its instance and number in
        `cursors`. Polled concurrently, in little more than a second."""
        listening = [unit for unit in units if unit.alive and unit.endpoint and unit.kind is Kind.GATEWAY]
        async with asyncio.TaskGroup() as tasks:
            asked = [
                (unit.slot, tasks.create_task(self._observed(unit, *cursors.get(unit.slot, ("", 0)))))
                for unit in listening
            ]
        return {slot: observed for slot, task in asked if (observed := task.result()) is not None}

    async def pressures(self, units: Iterable[ObservedUnit]) -> dict[str, Pressure]:
        """The load pressure of each gateway that responds, by slot; polled concurrently, in little more than a
        second."""
        listening = [unit for unit in units if unit.alive and unit.endpoint and unit.kind is Kind.GATEWAY]
        async with asyncio.TaskGroup() as tasks:
            asked = [
                (unit.slot, tasks.create_task(self._private_document(unit, "/pressure", Pressure)))
                for unit in listening
            ]
        return {slot: pressure for slot, task in asked if (pressure := task.result()) is not None}

    async def pages(self, units: Iterable[ObservedUnit]) -> dict[str, bytes]:
        """The metrics page of each gateway that responds, by slot; polled concurrently, in little more than a
        second."""
        listening = [unit for unit in units if unit.alive and unit.endpoint and unit.kind is Kind.GATEWAY]
        async with asyncio.TaskGroup() as tasks:
            asked = [(unit.slot, tasks.create_task(self._page(unit))) for unit in listening]
        return {slot: page for slot, task in asked if (page := task.result()) is not None}

    async def _ask_one(self, unit: ObservedUnit) -> Answer | None:
        endpoint = self._own_port(unit) or unit.endpoint
        assert endpoint is not None
        path = "/livez" if unit.kind is Kind.GATEWAY else "/load"
        body = await self._get(endpoint, path)
        if isinstance(body, NoAnswer):
            if body.ours:
                self.trouble = body.why
                return None
            return Silent(body.why)
        if unit.kind is Kind.GATEWAY:
            return Answered()
        try:
            report = msgspec.json.decode(body, type=LoadReport)
        except UNREADABLE as error:
            return Silent(f"its load report cannot be read: {error}")
        if (report.replica, report.generation) != unit.key:
            return Silent(f"{report.replica} generation {report.generation} responds at its address")
        return Answered(report)

    async def _demand(self, unit: ObservedUnit) -> Demand | None:
        return await self._private_document(unit, "/demand", Demand)

    async def _observed(self, unit: ObservedUnit, instance: str, after: int) -> Observed | None:
        return await self._private_document(unit, f"/observations?after={after}&instance={quote(instance)}", Observed)

    async def _private_document(self, unit: ObservedUnit, path: str, document: type[D]) -> D | None:
        """A document from a gateway's private port. The public port does not serve it, and counts such requests."""
        endpoint = self._own_port(unit)
        if endpoint is None:
            return None
        body = await self._get(endpoint, path)
        try:
            return None if isinstance(body, NoAnswer) else msgspec.json.decode(body, type=document)
        except UNREADABLE:
            return None

    async def _page(self, unit: ObservedUnit) -> bytes | None:
        endpoint = self._own_port(unit)
        if endpoint is None:
            return None
        body = await self._get(endpoint, "/metrics")
        return None if isinstance(body, NoAnswer) else body

    async def _get(self, endpoint: Endpoint, target: str) -> bytes | NoAnswer:
        async with self._room:
            return await fetch_once(endpoint.host, endpoint.port, target.encode(), TIMEOUT_S, BODY_BYTES_MAX)

    def _own_port(self, unit: ObservedUnit) -> Endpoint | None:
        """A gateway's private port, which it shares with no other process; None: not published yet."""
        if unit.kind is not Kind.GATEWAY:
            return unit.endpoint
        try:
            own = msgspec.json.decode((self._peers / f"{unit.slot}.json").read_bytes(), type=Endpoint)
        except (OSError, *UNREADABLE):
            return None
        return own if own.pid == unit.pid else None
