"""gRPC streams: several requests on one, decoupled models with any number of responses, cancellation."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from forebay.cli.conformance.cases.refused_rpc import GOOD, rpc
from forebay.cli.conformance.check import Check, Json
from forebay.cli.conformance.server import Server
from forebay.cli.conformance.tensors import packed

EMPTY_FINAL: Final = {"triton_enable_empty_final_response": True}


def _repeat(count: int, wait_ms: int | None = None, **more: Any) -> Any:
    from forebay.cli.conformance.rpc import infer

    inputs = [("COUNT", "INT32", [1], packed("INT32", [count]))]
    if wait_ms is not None:
        inputs.append(("WAIT_MS", "INT32", [1], packed("INT32", [wait_ms])))
    return infer("repeat", inputs, **more)


def _counted(name: str, counts: Sequence[int], **more: Any) -> Check:
    async def run(server: Server) -> Json:
        requests = [_repeat(count, id=f"{number}", **more) for number, count in enumerate(counts)]
        seen = await rpc(server).stream(requests)
        return sorted(seen, key=_by_request)

    return Check(f"streams/{name}", run, ("repeat",), grpc=True)


def _by_request(seen: Json) -> str:
    return str(seen.get("id", "")) if isinstance(seen, dict) else ""


async def _single(server: Server) -> Json:
    """ModelInfer of a decoupled model."""
    return await rpc(server).send("ModelInfer", _repeat(1))


async def _coupled(server: Server) -> Json:
    """Models that are not decoupled work on streams too; an invalid request does not end the stream."""
    from forebay.cli.conformance.rpc import infer

    good = infer("add_sub", GOOD, id="good")
    bad = infer("add_sub", GOOD[:1], id="bad")
    seen = [await rpc(server).stream(each) for each in ([good], [bad], [good, good])]
    return list(seen)


async def _coupled_final(server: Server) -> Json:
    from forebay.cli.conformance.rpc import infer

    return await rpc(server).stream([infer("add_sub", GOOD, parameters=EMPTY_FINAL)])


async def _unknown(server: Server) -> Json:
    from forebay.cli.conformance.rpc import infer

    return await rpc(server).stream([infer("no_such_model", GOOD), infer("add_sub", GOOD, id="good")])


async def _nothing(server: Server) -> Json:
    return await rpc(server).stream([])


async def _cancelled(server: Server) -> Json:
    """After a client has cancelled a stream, the model serves the next request."""
    call = rpc(server).stub.ModelStreamInfer()
    await call.write(_repeat(1000, 20))
    first = await call.read()
    call.cancel()
    async with asyncio.timeout(10):
        then = await rpc(server).stream([_repeat(1)])
    return {"first": list(first.infer_response.outputs[0].shape), "then": then}


def checks() -> list[Check]:
    """All checks of this module."""
    return [
        _counted("3 answers", [3]),
        _counted("no answers", [0]),
        _counted("no answers, final asked for", [0], parameters=EMPTY_FINAL),
        _counted("2 answers, final asked for", [2], parameters=EMPTY_FINAL),
        _counted("2 requests", [2, 1]),
        _counted("error after 2", [-2]),
        _counted("error after 2, final asked for", [-2], parameters=EMPTY_FINAL),
        Check("streams/single call", _single, ("repeat",), grpc=True),
        Check("streams/ordinary model", _coupled, ("add_sub",), grpc=True),
        Check("streams/ordinary model, final asked for", _coupled_final, ("add_sub",), grpc=True),
        Check("streams/unknown model", _unknown, ("add_sub",), grpc=True),
        Check("streams/no request", _nothing, ("add_sub",), grpc=True),
        Check("streams/cancelled", _cancelled, ("repeat",), grpc=True),
    ]
