"""Observability: metrics, trace and log settings. Changed settings are restored."""

import asyncio
import re
from typing import Any, Final

from forebay.cli.conformance.cases.refused import vector
from forebay.cli.conformance.cases.refused_rpc import rpc
from forebay.cli.conformance.cases.scheduling import Arrival, arrive
from forebay.cli.conformance.check import Check, Json
from forebay.cli.conformance.server import Server

TRACE: Final = "/v2/trace/setting"
LOG: Final = "/v2/logging"

TRACES: Final[dict[str, bytes | Json]] = {
    "level": {"trace_level": ["TIMESTAMPS"]},
    "level off": {"trace_level": ["OFF"]},
    "level unknown": {"trace_level": ["LOUD"]},
    "level a string": {"trace_level": "TIMESTAMPS"},
    "rate": {"trace_rate": "500"},
    "rate a number": {"trace_rate": 500},
    "rate not a number": {"trace_rate": "often"},
    "rate negative": {"trace_rate": "-1"},
    "count": {"trace_count": "100"},
    "count -2": {"trace_count": "-2"},
    "log frequency": {"log_frequency": "7"},
    "file": {"trace_file": "/tmp/forebay-conformance-trace"},  # noqa: S108 - refused: the file is set at the start
    "unknown": {"colour": "green"},
    "mode": {"trace_mode": "opentelemetry"},
    "null": {"trace_rate": None},
    "not JSON": b"hello",
}
LOGS: Final[dict[str, bytes | Json]] = {
    "verbose": {"log_verbose_level": 0},
    "verbose a string": {"log_verbose_level": "1"},
    "verbose negative": {"log_verbose_level": -1},
    "info a string": {"log_info": "yes"},
    "info a number": {"log_info": 1},
    "format": {"log_format": "default"},
    "format unknown": {"log_format": "pretty"},
    "file": {"log_file": "/nowhere/at/all"},
    "unknown": {"colour": "green"},
    "not JSON": b"hello",
}
TRACE_BACK: Final[Json] = {"trace_level": None, "trace_rate": None, "trace_count": None, "log_frequency": None}


def _steady(seen: dict[str, Json]) -> Json:
    """Without file paths, which depend on the server."""
    body = seen.get("body")
    if isinstance(body, dict):
        return {**seen, "body": {key: value for key, value in body.items() if key not in {"trace_file", "log_file"}}}
    return seen


def _trace(name: str, body: bytes | Json) -> Check:
    async def run(server: Server) -> Json:
        answer = (await server.post(TRACE, body)).seen()
        await server.post(TRACE, TRACE_BACK)
        return _steady(answer)

    return Check(f"settings/trace {name}", run)


def _log(name: str, body: bytes | Json) -> Check:
    async def run(server: Server) -> Json:
        answer = (await server.post(LOG, body)).seen()
        return _steady(answer)

    return Check(f"settings/log {name}", run)


async def _trace_of_model(server: Server) -> Json:
    """A model's own setting overrides the server's, and null clears it."""
    path = "/v2/models/add_sub/trace/setting"
    bodies: list[Json] = [{"trace_rate": "77"}, {"trace_rate": None}]
    seen = [_steady((await server.get(path)).seen())]
    seen += [_steady((await server.post(path, body)).seen()) for body in bodies]
    unknown = await server.get("/v2/models/no_such_model/trace/setting")
    return [*seen, unknown.seen()]


async def _read(server: Server) -> Json:
    return [_steady((await server.get(path)).seen()) for path in (TRACE, LOG)]


async def _by_rpc(server: Server) -> Json:
    calls: list[tuple[str, dict[str, Json]]] = [
        ("TraceSetting", {}),
        ("TraceSetting", {"settings": {"trace_rate": {"value": ["500"]}}}),
        ("TraceSetting", {"settings": {"trace_rate": {"value": ["500", "600"]}}}),
        ("TraceSetting", {"settings": {"trace_level": {"value": ["LOUD"]}}}),
        ("TraceSetting", {"settings": {"trace_rate": {}}}),
        ("LogSettings", {}),
        ("LogSettings", {"settings": {"log_verbose_level": {"uint32_param": 0}}}),
        ("LogSettings", {"settings": {"log_verbose_level": {"string_param": "1"}}}),
    ]
    seen: list[Json] = []
    for name, message in calls:
        answer = await rpc(server).call(name, message)
        settings = answer.get("settings")
        if isinstance(settings, dict):
            answer["settings"] = {key: settings[key] for key in sorted(settings) if not key.endswith("_file")}
        seen.append(answer)
    return seen


SAMPLE: Final = re.compile(r"^(nv_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
SETTLE_S: Final = 0.3
"""Triton counts a request shortly after responding."""
NEWER: Final = frozenset({"nv_model_load_duration_secs"})
"""Metrics of newer Triton versions than the recorded one: having them is no deviation."""


async def _of(server: Server, model: str) -> dict[str, Json]:
    """Samples of a model: counts unchanged, durations as whether they are positive. Labels are sorted."""
    await asyncio.sleep(SETTLE_S)
    assert server.metrics is not None
    text = (await server.http.get(server.metrics)).text
    found: dict[str, Json] = {}
    for name, labels, value in SAMPLE.findall(text):
        pairs = sorted(re.findall(r'(\w+)="([^"]*)"', labels))
        if ("model", model) in pairs and name not in NEWER:
            shown = ",".join(f"{key}={each}" for key, each in pairs if key != "model")
            number = float(value)
            found[f"{name}{{{shown}}}"] = number > 0 if "_duration" in name else number
    return found


async def _requests(server: Server) -> Json:
    """Two valid requests, and one that is rejected at once."""
    await server.reload("plain")
    body: dict[str, Any] = {"inputs": [vector(shape=[4]), vector("IN1", shape=[4])]}
    for given in (body, body, {"inputs": body["inputs"][:1]}):
        await server.infer("plain", given)
    return await _of(server, "plain")


async def _failures(server: Server) -> Json:
    """One request that succeeds, and one that makes the model raise. Triton's count of failures survives a reload."""
    await server.reload("broken")
    earlier = await _of(server, "broken")
    for how in ("fine", "raise"):
        given = {"name": "HOW", "datatype": "BYTES", "shape": [1, 1], "data": [how]}
        await server.infer("broken", {"inputs": [given]})
    later = await _of(server, "broken")
    return {name: now - earlier.get(name, 0) if "_failure" in name else now for name, now in later.items()}


async def _rejected(server: Server) -> Json:
    """After a first request: five at once where one runs and two may queue."""
    await server.reload("queue_short")
    arrivals = [Arrival(), *(Arrival(0.04 + number * 0.02) for number in range(4))]
    await arrive(server, "queue_short", arrivals)
    return await _of(server, "queue_short")


async def _batch(server: Server) -> Json:
    """One request alone, then four in one batch."""
    await server.reload("preferred")
    await arrive(server, "preferred", [Arrival()] * 4)
    return await _of(server, "preferred")


METRICS: Final = {"plain": _requests, "broken": _failures, "queue_short": _rejected, "preferred": _batch}
"""Check by model: metric names, labels and counts that Triton dashboards use, after known requests."""


def checks() -> list[Check]:
    """All checks of this module."""
    return [
        *(_trace(name, body) for name, body in TRACES.items()),
        *(_log(name, body) for name, body in LOGS.items()),
        Check("settings/read", _read),
        Check("settings/trace of a model", _trace_of_model, ("add_sub",)),
        Check("settings/over gRPC", _by_rpc, grpc=True),
        *(Check(f"metrics/{model}", run, (model,), metrics=True) for model, run in METRICS.items()),
    ]
