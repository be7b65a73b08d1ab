"""What units say of themselves: a worker that lies, or that is somebody else's process, harms nobody."""

import asyncio
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.corpus import json_bytes, survives
from tests.net.rig import run, serving

from forebay.control.probe import Prober
from forebay.core.model import Endpoint, LoadReport, ModelRoutes, Policy, Replica, ReplicaState, Task
from forebay.core.reconcile import Answered, Kind, ObservedUnit, Silent
from forebay.gateway.account import Account
from forebay.gateway.fleet import Served
from forebay.net.client import Pool
from forebay.net.fetching import fetch_once
from forebay.net.server import Exchange
from forebay.obs.metrics import Metrics
from forebay.wire.documents import UNREADABLE
from forebay.wire.http1 import JSON

REPORTS = [
    {"replica": "m-0", "generation": 1, "model": "m", "revision": "r", "state": "ready"},
    {
        "replica": "m-0", "generation": 1, "model": "m", "revision": "r", "state": "draining", "in_flight": 3,
        "running": 2, "waiting": 1, "capacity": 8, "kv_used_tokens": 10, "kv_total_tokens": 100, "batch_fill": 0.5,
        "stalled_s": 3.0, "engine_restarts": 1, "engine_pid": 7,
    },
]  # fmt: skip
STATES = ["ready", "degraded", "stopped", -(2**63), 2**62]
reports = json_bytes(REPORTS, STATES)
ROUTES = ModelRoutes("m", Task.CHAT, Policy.CPR, "r", 8, 10.0)
over_sockets = settings(max_examples=max(20, settings().max_examples // 10))
"""These take a hundred times as long."""


@given(st.lists(reports, min_size=1, max_size=5))
def test_any_load_reports_leave_a_replica_with_sane_figures(bodies: list[bytes]) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            served = Served(ROUTES, Account(Metrics(), "m"))
            replica = Replica("m-0", 1, "r", "127.0.0.1", 1, ReplicaState.READY)
            link = served.link(replica, Pool("127.0.0.1", 1, group))
            served.links = [link]
            for now, body in enumerate(bodies):
                report = survives(lambda data: msgspec.json.decode(data, type=LoadReport), body, *UNREADABLE)
                if report is not None:
                    served.apply_report(link, report, 0, float(now), float(now))
                served.refresh(float(now))
                assert link.load >= 0
                assert link.room >= 0
                assert 0.0 <= link.meter.kv_share < 1.0
                assert link.meter.queue_tokens >= 0.0

    asyncio.run(scenario())


@over_sockets
@given(st.lists(reports, min_size=1, max_size=10))
def test_control_makes_of_any_answer_a_report_or_silence(bodies: list[bytes]) -> None:
    left = list(bodies)

    def answer(exchange: Exchange) -> None:
        exchange.respond(200, [JSON], left.pop())

    async def scenario() -> None:
        prober = Prober(Path("nowhere"))
        async with serving(answer) as server:
            endpoint = Endpoint(1, "127.0.0.1", server.port)
            unit = ObservedUnit("m-0", 1, Kind.REPLICA, "", 1.0, True, endpoint=endpoint)
            while left:
                (said,) = (await prober.ask([unit])).values()
                assert isinstance(said, Answered | Silent)

    run(scenario())


@over_sockets
@given(reports)
def test_a_gateway_gets_any_small_answer_as_it_is(body: bytes) -> None:
    async def scenario() -> None:
        async with serving(lambda exchange: exchange.respond(200, [JSON], body)) as server:
            assert await fetch_once("127.0.0.1", server.port, b"/load", 5.0) == body

    run(scenario())
