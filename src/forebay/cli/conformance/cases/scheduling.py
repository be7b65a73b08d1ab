"""Batching, ordering and rejection of requests. The timing needs a machine that is not loaded."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.cli.conformance.cases.forms import counters
from forebay.cli.conformance.check import Check, Json
from forebay.cli.conformance.server import Server

GAP_S: Final = 0.02
"""Interval between requests whose order matters."""

PREFIX: Final = "scheduling/"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of an arrival pattern."""

    at_s: float = 0.0
    rows: int = 1
    width: int = 1
    priority: int = 0
    timeout_us: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The execution that served a request, with its number of requests and rows, or the error."""

    execution: int = 0
    requests: int = 0
    rows: int = 0
    status: int = 200
    error: str = ""
    took_s: float = 0.0
    done_s: float = 0.0


async def _send(server: Server, model: str, arrival: Arrival, start: float, *, batches: bool) -> Outcome:
    await asyncio.sleep(max(0.0, start + arrival.at_s - time.monotonic()))
    shape = [arrival.rows, arrival.width] if batches else [arrival.width]
    given = {"name": "IN", "datatype": "INT32", "shape": shape, "data": [0] * (arrival.rows * arrival.width)}
    body: dict[str, Any] = {"inputs": [given]}
    parameters = {"priority": arrival.priority, "timeout": arrival.timeout_us}
    body["parameters"] = {key: value for key, value in parameters.items() if value}
    sent = time.monotonic()
    answer = await server.infer(model, body)
    done = time.monotonic()
    if answer.status != 200:
        seen = answer.seen()
        return Outcome(
            status=answer.status, error=str(seen.get("error", "")), took_s=done - sent, done_s=done - start
        )
    data = answer.json["outputs"][0]["data"]
    return Outcome(data[0], data[1], data[2], took_s=done - sent, done_s=done - start)


async def arrive(server: Server, model: str, arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Send a pattern and return the outcomes in its order. A first request opens the connection."""
    await _send(server, model, Arrival(), time.monotonic(), batches=True)
    start = time.monotonic() + 0.05
    return list(await asyncio.gather(*(_send(server, model, each, start, batches=True) for each in arrivals)))


def executions(outcomes: Sequence[Outcome]) -> Json:
    """Requests and rows of each execution, in order."""
    found = {each.execution: [each.requests, each.rows] for each in outcomes if each.status == 200}
    return [found[key] for key in sorted(found)]


def order(outcomes: Sequence[Outcome]) -> Json:
    """The numbers of the requests in order of execution, without rejected ones."""
    served = [(each.execution, number) for number, each in enumerate(outcomes) if each.status == 200]
    return [number for _, number in sorted(served)]


def refusals(outcomes: Sequence[Outcome]) -> Json:
    """Number, status and error of the rejected requests."""
    return [
        {"number": number, "status": each.status, "error": each.error}
        for number, each in enumerate(outcomes)
        if each.status != 200
    ]


BURST: Final = [Arrival() for _ in range(11)]
SPREAD: Final = [Arrival(number * 0.08) for number in range(8)]
"""One request every 80 ms."""

PATTERNS: Final[dict[str, tuple[str, Sequence[Arrival]]]] = {
    "delay, 1 request": ("delayed", BURST[:1]),
    "delay, 11 at once": ("delayed", BURST),
    "delay, 16 at once": ("delayed", [Arrival()] * 16),
    "delay, 20 at once": ("delayed", [Arrival()] * 20),
    "delay, one each 80 ms": ("delayed", SPREAD),
    "delay, rows 3 3 3 8": ("delayed", [Arrival(rows=each, at_s=at * GAP_S) for at, each in enumerate((3, 3, 3, 8))]),
    "delay, rows 16": ("delayed", [Arrival(rows=16)]),
    "preferred 4 8, 1 request": ("preferred", BURST[:1]),
    "preferred 4 8, 4 at once": ("preferred", BURST[:4]),
    "preferred 4 8, 11 at once": ("preferred", BURST),
    "preferred 4 8, rows 3 3 3": ("preferred", [Arrival(rows=3, at_s=at * GAP_S) for at in range(3)]),
    "preferred 4 8, rows 9": ("preferred", [Arrival(rows=9)]),
    "preferred 1 4 8, 1 request": ("preferred_one", BURST[:1]),
    "no delay, 1 then 6": ("eager", [Arrival(), *[Arrival(0.1)] * 6]),
    "no batching, 4 at once": ("unbatched", BURST[:4]),
    "shapes a a b a": ("shapes", [Arrival(at * GAP_S, width=each) for at, each in enumerate((1, 1, 2, 1))]),
    "ragged shapes a a b a": ("ragged", [Arrival(at * GAP_S, width=each) for at, each in enumerate((1, 1, 2, 1))]),
}
"""Model and arrival pattern; the resulting executions are compared."""

PATIENCE: Final = {"delayed": 0.25, "preferred": 0.25, "preferred_one": 0.25}
"""For models with a queue delay: a response that took longer has waited for more requests."""


def _pattern(name: str, model: str, arrivals: Sequence[Arrival]) -> Check:
    async def run(server: Server) -> Json:
        outcomes = await arrive(server, model, arrivals)
        seen: dict[str, Json] = {"executions": executions(outcomes), "refused": refusals(outcomes)}
        if model in PATIENCE:
            seen["waited"] = max(each.took_s for each in outcomes) > PATIENCE[model]
        return seen

    return Check(f"{PREFIX}{name}", run, (model,))


def _ordered(name: str, model: str, arrivals: Sequence[Arrival]) -> Check:
    async def run(server: Server) -> Json:
        outcomes = await arrive(server, model, arrivals)
        return {"order": order(outcomes), "refused": refusals(outcomes)}

    return Check(f"{PREFIX}{name}", run, (model,))


def _after_one(*arrivals: tuple[int, int]) -> list[Arrival]:
    """One request that is executed at once, then these (priority, timeout in µs) while it runs."""
    later = [
        Arrival(0.04 + GAP_S * number, priority=priority, timeout_us=timeout)
        for number, (priority, timeout) in enumerate(arrivals)
    ]
    return [Arrival(), *later]


ORDERS: Final[dict[str, tuple[str, Sequence[Arrival]]]] = {
    "priorities": ("priorities", _after_one((3, 0), (2, 0), (0, 0), (1, 0), (3, 0), (1, 0))),
    "priority too low": ("priorities", [Arrival(priority=4)]),
    "queue of 2": ("queue_short", _after_one(*[(0, 0)] * 5)),
    "late ones rejected": ("queue_reject", _after_one((0, 0), (0, 0))),
    "late ones rejected, own timeout not allowed": ("queue_reject", _after_one((0, 1000))),
    "own timeout": ("queue_override", _after_one((0, 0), (0, 100_000), (0, 0))),
    "own timeout longer than the queue's": ("queue_override", _after_one((0, 9_000_000))),
    "own timeout, no policy": ("eager", _after_one((0, 1000))),
}
"""Model and arrival pattern; the order of execution and the rejections are compared."""


async def _refused_counters(server: Server) -> Json:
    """A rejected request counts as failed, not as an inference."""
    await server.reload("queue_short")
    await arrive(server, "queue_short", _after_one(*[(0, 0)] * 4))
    await asyncio.sleep(0.2)
    return counters((await server.get("/v2/models/queue_short/stats")).json)


async def _batch_counters(server: Server) -> Json:
    """11 requests in few executions: counters per batch size."""
    await server.reload("delayed")
    await arrive(server, "delayed", BURST)
    await asyncio.sleep(0.2)
    return counters((await server.get("/v2/models/delayed/stats")).json)


async def _warm(server: Server) -> Json:
    """Warm-up runs before the first request, and is counted."""
    given = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [0]}
    answer = (await server.infer("warm", {"inputs": [given]})).inferred()
    await asyncio.sleep(0.2)
    return {"answer": answer, "stats": counters((await server.get("/v2/models/warm/stats")).json)}


def _together(name: str, models: tuple[str, str], limit_s: float) -> Check:
    """Whether two requests run at the same time."""

    async def run(server: Server) -> Json:
        for model in models:
            await _send(server, model, Arrival(), time.monotonic(), batches=False)
        start = time.monotonic() + 0.05
        both = await asyncio.gather(*(_send(server, model, Arrival(), start, batches=False) for model in models))
        return {"together": max(each.done_s for each in both) < limit_s, "refused": refusals(both)}

    return Check(f"{PREFIX}{name}", run, tuple(sorted(set(models))))


def checks() -> list[Check]:
    """All checks of this module."""
    return [
        *(_pattern(name, *row) for name, row in PATTERNS.items()),
        *(_ordered(name, *row) for name, row in ORDERS.items()),
        Check("statistics/refused", _refused_counters, ("queue_short",)),
        Check("statistics/one batch", _batch_counters, ("delayed",)),
        Check("scheduling/warm-up", _warm, ("warm",)),
        _together("two instances", ("pair", "pair"), 0.5),
        _together("one resource for two models", ("limited_a", "limited_b"), 0.35),
    ]
