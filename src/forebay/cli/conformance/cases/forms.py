"""Valid HTTP requests in every form of the protocol: datatypes, JSON and binary, classification, counters."""

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from forebay.cli.conformance.cases.refused import ONES, PATH, RAW, request, vector
from forebay.cli.conformance.check import Check, Json
from forebay.cli.conformance.repository import TYPES
from forebay.cli.conformance.server import Server
from forebay.cli.conformance.tensors import packed

VALUES: Final[dict[str, list[Any]]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65_535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-32_768, 32_767],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP16": [0.5, -65_504.0],
    "FP32": [0.1, -3.4e38],
    "FP64": [0.1, -1.7e308],
    "BF16": [0x3F80, 0xC000],
    "BYTES": ["word", 'Größe " \\ \n €'],
}
"""Extreme values of each datatype; BF16 as bits."""

BEYOND: Final[dict[str, list[Any]]] = {
    "BOOL": [0, 1],
    "UINT8": [256, -1],
    "INT8": [128, -129],
    "UINT16": [65_536, -1],
    "INT16": [32_768, -1],
    "UINT32": [2**32, -1],
    "INT32": [2**31, -1],
    "UINT64": [2**64, -1],
    "INT64": [2**63, -1],
    "BYTES": [1, 2],
}
"""JSON values outside the range of a datatype."""


def _typed(datatype: str, data: Any, shape: Sequence[int], binary: int | None = None) -> dict[str, Any]:
    given: dict[str, Any] = {"name": f"IN_{datatype}", "datatype": datatype, "shape": list(shape)}
    given |= {"data": data} if binary is None else {"parameters": {"binary_data_size": binary}}
    return given


def _asked(datatype: str, binary: bool) -> list[Json]:
    return [{"name": f"OUT_{datatype}", "parameters": {"binary_data": binary}}]


def _types() -> list[Check]:
    found = []
    for datatype in TYPES:
        values = VALUES[datatype]
        data = packed(datatype, [each.encode() if isinstance(each, str) else each for each in values])

        async def by_json(server: Server, datatype: str = datatype, values: list[Any] = values) -> Json:
            body = {"inputs": [_typed(datatype, values, [2])], "outputs": _asked(datatype, False)}
            return (await server.infer("types", body)).inferred()

        async def by_bytes(server: Server, datatype: str = datatype, data: bytes = data) -> Json:
            body = {"inputs": [_typed(datatype, None, [2], len(data))], "outputs": _asked(datatype, True)}
            return (await server.infer("types", body, data)).inferred()

        async def crossed(server: Server, datatype: str = datatype, data: bytes = data) -> Json:
            body = {"inputs": [_typed(datatype, None, [2], len(data))], "outputs": _asked(datatype, False)}
            return (await server.infer("types", body, data)).inferred()

        async def empty(server: Server, datatype: str = datatype) -> Json:
            body = {"inputs": [_typed(datatype, [], [0])], "outputs": _asked(datatype, False)}
            return (await server.infer("types", body)).inferred()

        runs: dict[str, Callable[[Server], Awaitable[Json]]] = {
            "in JSON": by_json,
            "in bytes": by_bytes,
            "bytes to JSON": crossed,
            "without elements": empty,
        }
        found += [Check(f"types/{datatype} {how}", run, ("types",)) for how, run in runs.items()]
    for datatype, beyond in BEYOND.items():

        async def too_much(server: Server, datatype: str = datatype, beyond: list[Any] = beyond) -> Json:
            body = {"inputs": [_typed(datatype, beyond, [2])], "outputs": _asked(datatype, False)}
            return (await server.infer("types", body)).inferred()

        found.append(Check(f"types/{datatype} beyond", too_much, ("types",)))
    return found


async def _words_not_text(server: Server) -> Json:
    data = packed("BYTES", [b"\xff\xfe", b"\x00\x01"])
    body = {"inputs": [_typed("BYTES", None, [2], len(data))], "outputs": _asked("BYTES", True)}
    return (await server.infer("types", body, data)).inferred()


async def _special_floats(server: Server) -> Json:
    data = packed("FP32", [float("inf"), float("-inf"), float("nan"), -0.0])
    body = {"inputs": [_typed("FP32", None, [4], len(data))], "outputs": _asked("FP32", False)}
    answer = await server.infer("types", body, data)
    return {"status": answer.status, "json": "text" if isinstance(answer.json, str) else "value"}


async def _no_inputs_at_all(server: Server) -> Json:
    return (await server.infer("types", {"inputs": []})).inferred()


async def _several(server: Server) -> Json:
    given = [_typed("INT8", [1, 2], [2]), _typed("BYTES", ["a"], [1]), _typed("BOOL", [True], [1])]
    body = {"inputs": given, "outputs": [*_asked("BOOL", False), *_asked("INT8", True), *_asked("BYTES", True)]}
    return (await server.infer("types", body)).inferred()


FORMS: Final[dict[str, Json]] = {
    "plain": request(),
    "id": request(id="order 7"),
    "id empty": request(id=""),
    "all in binary": request(parameters={"binary_data_output": True}),
    "all in binary but one": request(
        parameters={"binary_data_output": True},
        outputs=[{"name": "OUT0", "parameters": {"binary_data": False}}, {"name": "OUT1"}],
    ),
    "one output": request(outputs=[{"name": "OUT1"}]),
    "outputs the other way round": request(outputs=[{"name": "OUT1"}, {"name": "OUT0"}]),
    "outputs in both forms": request(
        outputs=[{"name": "OUT1", "parameters": {"binary_data": True}}, {"name": "OUT0"}]
    ),
    "inputs the other way round": {"inputs": [vector("IN1"), vector(data=[4.0, 3.0, 2.0, 1.0])]},
    "batch of 2": {
        "inputs": [
            vector(shape=[2, 4], data=[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]),
            vector("IN1", shape=[2, 4], data=ONES * 2),
        ]
    },
}
"""Valid requests for `add_sub`."""

CLASSES: Final[dict[str, Json]] = {
    "with labels": [{"name": "OUT0", "parameters": {"classification": 2}}],
    "without labels": [{"name": "OUT1", "parameters": {"classification": 2}}],
    "more than there are": [{"name": "OUT0", "parameters": {"classification": 9}}],
    "in binary": [{"name": "OUT0", "parameters": {"classification": 3, "binary_data": True}}],
}


def _form(name: str, body: Json) -> Check:
    async def run(server: Server) -> Json:
        return (await server.infer("add_sub", body)).inferred()

    return Check(f"forms/{name}", run, ("add_sub",))


def _class(name: str, outputs: Json) -> Check:
    async def run(server: Server) -> Json:
        first = vector(shape=[2, 4], data=[0.5, 4.0, 3.0, 1.0, 9.0, 9.0, 10.0, 0.0])
        body = {"inputs": [first, vector("IN1", shape=[2, 4], data=ONES * 2)], "outputs": outputs}
        return (await server.infer("add_sub", body)).inferred()

    return Check(f"forms/classes {name}", run, ("add_sub",))


def _compressed(accepted: str) -> Check:
    async def run(server: Server) -> Json:
        answer = await server.infer("add_sub", request(), headers={"accept-encoding": accepted})
        return {"compressed": "content-encoding" in answer.headers, **answer.inferred()}

    return Check(f"forms/compressed as {accepted}", run, ("add_sub",))


async def _deflated(server: Server) -> Json:
    body = zlib.compress(json.dumps(request()).encode())
    return (await server.ask("POST", PATH, body, {"content-encoding": "deflate"})).inferred()


async def _headers(server: Server) -> Json:
    """Content types, which clients rely on."""
    plain = await server.infer("add_sub", request())
    two = [{"name": f"OUT{each}", "parameters": {"binary_data": True}} for each in (0, 1)]
    given = {"name": "IN0", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    binary = await server.infer("add_sub", {"inputs": [given, vector("IN1")], "outputs": two}, RAW)
    wrong = await server.infer("add_sub", {})
    about = await server.get("/v2")
    shown = {"JSON": plain, "binary": binary, "error": wrong, "metadata": about}
    return {name: answer.headers.get("content-type", "") for name, answer in shown.items()}


def counters(stats: Any) -> Json:
    """Statistics independent of timing: durations become whether they are positive."""
    if isinstance(stats, dict):
        return {key: _counter(key, value) for key, value in stats.items() if key != "memory_usage"}
    return [counters(each) for each in stats] if isinstance(stats, list) else stats


def _counter(key: str, value: Any) -> Json:
    if key == "ns":
        return int(value) > 0
    if key == "last_inference":
        return int(value) > 0
    return counters(value)


async def _statistics(server: Server) -> Json:
    """Counters after a known sequence: three valid requests and one that is rejected at once."""
    await server.reload("plain")
    before = (await server.get("/v2/models/plain/stats")).json
    body: dict[str, Any] = {"inputs": [vector(shape=[4]), vector("IN1", shape=[4])]}
    for _ in range(3):
        await server.infer("plain", body)
    await server.infer("plain", {"inputs": [vector(shape=[4])]})
    await asyncio.sleep(0.2)
    after = (await server.get("/v2/models/plain/versions/1/stats")).json
    return {"before": counters(before), "after": counters(after)}


async def _batch_statistics(server: Server) -> Json:
    await server.reload("free")
    for rows in (1, 3, 3):
        given = {"name": "IN", "datatype": "FP32", "shape": [rows, 1, 2], "data": [1.0, 2.0] * rows}
        await server.infer("free", {"inputs": [given]})
    await asyncio.sleep(0.2)
    return counters((await server.get("/v2/models/free/stats")).json)


async def _cache(server: Server) -> Json:
    """The second of two equal requests is served from the cache, if there is one."""
    answers = [
        (await server.infer("cached", request(vector(data=[float(each)] * 4)))).inferred() for each in (1, 1, 2)
    ]
    await asyncio.sleep(0.2)
    return {"answers": answers, "stats": counters((await server.get("/v2/models/cached/stats")).json)}


async def _reshape(server: Server) -> Json:
    given = {"name": "IN", "datatype": "FP32", "shape": [2, 4], "data": [1.0] * 8}
    return (await server.infer("reshaped", {"inputs": [given]})).inferred()


async def _about(server: Server) -> Json:
    body = {
        "id": "it",
        "inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}],
        "outputs": [{"name": "ABOUT"}],
        "parameters": {"colour": "green", "depth": 3, "flat": True, "timeout": 5_000_000, "weight": 1.5},
    }
    return (await server.infer("about", body)).inferred()


def _variable(shape: list[int], data: list[float]) -> Check:
    async def run(server: Server) -> Json:
        given = {"name": "IN", "datatype": "FP32", "shape": shape, "data": data}
        return (await server.infer("free", {"inputs": [given]})).inferred()

    return Check(f"forms/variable {shape}", run, ("free",))


def checks() -> list[Check]:
    """All checks of this module."""
    return [
        *_types(),
        Check("types/BYTES that are no text", _words_not_text, ("types",)),
        Check("types/FP32 infinite", _special_floats, ("types",)),
        Check("types/nothing at all", _no_inputs_at_all, ("types",)),
        Check("types/several at once", _several, ("types",)),
        *(_form(name, body) for name, body in FORMS.items()),
        *(_class(name, outputs) for name, outputs in CLASSES.items()),
        *(_compressed(each) for each in ("gzip", "deflate", "gzip, deflate", "br", "identity, gzip;q=0")),
        Check("forms/deflated", _deflated, ("add_sub",)),
        Check("forms/content types", _headers, ("add_sub",)),
        Check("forms/reshaped", _reshape, ("reshaped",)),
        Check("forms/what a model sees", _about, ("about",)),
        *(_variable(shape, [1.0] * size) for shape, size in (([1, 3, 2], 6), ([1, 0, 2], 0), ([1, 3, 3], 9))),
        Check("statistics/requests", _statistics, ("plain",)),
        Check("statistics/batches", _batch_statistics, ("free",)),
        Check("statistics/cache", _cache, ("cached",)),
    ]
