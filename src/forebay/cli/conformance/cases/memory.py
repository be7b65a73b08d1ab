"""System shared memory: registering, using and exceeding regions. Suite and server must run on the same machine."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Final

from forebay.cli.conformance.cases.refused import ONES, vector
from forebay.cli.conformance.check import Check, Json
from forebay.cli.conformance.server import Server
from forebay.cli.conformance.tensors import packed, unpacked

PATH: Final = "/v2/systemsharedmemory"
SIZE: Final = 4096


@asynccontextmanager
async def _region(server: Server, name: str = "region", **changes: Json) -> AsyncIterator[tuple[SharedMemory, Json]]:
    """Shared memory registered as `name`, with the response to that; it is unregistered afterwards."""
    memory = SharedMemory(f"forebay-{secrets.token_hex(4)}", create=True, size=SIZE)
    try:
        body: dict[str, Json] = {"key": f"/{memory.name}", "offset": 0, "byte_size": 64, **changes}
        answer = await server.post(f"{PATH}/region/{name}/register", body)
        yield memory, answer.seen()
    finally:
        memory.close()
        memory.unlink()
        await server.post(f"{PATH}/region/{name}/unregister", {})


def _shared(size: Json = 16, offset: Json = None, name: str = "region") -> dict[str, Any]:
    found: dict[str, Any] = {"shared_memory_region": name, "shared_memory_byte_size": size}
    return found if offset is None else {**found, "shared_memory_offset": offset}


async def _both_ways(server: Server) -> Json:
    """Inputs are read from the region, outputs are written to it."""
    async with _region(server) as (memory, registered):
        view = memory.buf
        assert view is not None
        view[:32] = packed("FP32", [1.0, 2.0, 3.0, 4.0, *ONES])
        inputs = [vector(data=None, parameters=_shared()), vector("IN1", data=None, parameters=_shared(offset=16))]
        outputs = [{"name": "OUT0", "parameters": _shared(offset=32)}, {"name": "OUT1"}]
        answer = (await server.infer("add_sub", {"inputs": inputs, "outputs": outputs})).inferred()
        written = unpacked("FP32", bytes(view[32:48]))
        status = (await server.get(f"{PATH}/region/region/status")).json
        for each in status if isinstance(status, list) else []:
            each.pop("key", None)
        return {"registered": registered, "answer": answer, "written": written, "status": status}


def _input(name: str, parameters: dict[str, Any]) -> Check:
    async def run(server: Server) -> Json:
        async with _region(server):
            body = {"inputs": [vector(data=None, parameters=parameters), vector("IN1")]}
            return (await server.infer("add_sub", body)).inferred()

    return Check(f"memory/input {name}", run, ("add_sub",))


def _output(name: str, parameters: dict[str, Any]) -> Check:
    async def run(server: Server) -> Json:
        async with _region(server):
            outputs = [{"name": "OUT0", "parameters": parameters}]
            return (
                await server.infer("add_sub", {"inputs": [vector(), vector("IN1")], "outputs": outputs})
            ).inferred()

    return Check(f"memory/output {name}", run, ("add_sub",))


def _registered(name: str, **changes: Json) -> Check:
    async def run(server: Server) -> Json:
        async with _region(server, **changes) as (_, registered):
            return registered

    return Check(f"memory/register {name}", run, ("add_sub",))


async def _twice(server: Server) -> Json:
    async with _region(server) as (memory, _):
        body: Json = {"key": f"/{memory.name}", "offset": 0, "byte_size": 64}
        again = (await server.post(f"{PATH}/region/region/register", body)).seen()
        return {"status": again["status"], "error": bool(again.get("error"))}


async def _fields(server: Server) -> Json:
    """Registering without required fields."""
    bodies: list[bytes | Json] = [b"", {}, {"key": "/x"}, {"byte_size": 16}, {"key": 7, "byte_size": 16}, []]
    return [(await server.post(f"{PATH}/region/region/register", body)).seen() for body in bodies]


async def _unknown(server: Server) -> Json:
    paths = [("GET", "region/nowhere/status"), ("POST", "region/nowhere/unregister"), ("GET", "status")]
    others = [("GET", "region/nowhere/register"), ("POST", "unregister"), ("GET", "nonsense"), ("POST", "status")]
    seen = [
        (await server.ask(method, f"{PATH}/{path}", {} if method == "POST" else None)).seen()
        for method, path in paths
    ]
    return [*seen, *[(await server.ask(method, f"{PATH}/{path}")).seen() for method, path in others]]


async def _device(server: Server) -> Json:
    return (await server.get("/v2/cudasharedmemory/status")).seen()


def checks() -> list[Check]:
    """All checks of this module."""
    return [
        Check("memory/both ways", _both_ways, ("add_sub",)),
        _input("beyond its end", _shared(offset=56)),
        _input("offset beyond its end", _shared(offset=5000)),
        _input("offset negative", _shared(offset=-16)),
        _input("size of another tensor", _shared(size=12)),
        _input("size zero", _shared(size=0)),
        _input("size negative", _shared(size=-16)),
        _input("size a string", _shared(size="16")),
        _input("size huge", _shared(size=2**63 - 1, offset=16)),
        _output("too small", _shared(size=8)),
        _output("larger than it needs", _shared(size=32)),
        _output("beyond its end", _shared(offset=56)),
        _registered("larger than the memory", byte_size=1 << 20),
        _registered("offset beyond the memory", offset=1 << 20),
        _registered("of nothing", key="/forebay-conformance-none"),
        _registered("of no bytes", byte_size=0),
        _registered("with a path", key="/../etc/passwd"),
        Check("memory/register twice", _twice, ("add_sub",)),
        Check("memory/register without fields", _fields, ("add_sub",)),
        Check("memory/unknown", _unknown, ("add_sub",)),
        Check("memory/of devices", _device, ("add_sub",)),
    ]
