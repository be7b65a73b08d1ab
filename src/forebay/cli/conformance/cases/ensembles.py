"""Ensembles, calls between models, and failing models."""

import asyncio
from typing import Any, Final

from forebay.cli.conformance.cases.forms import counters
from forebay.cli.conformance.cases.refused import ONES
from forebay.cli.conformance.check import Check, Json
from forebay.cli.conformance.server import Server

HOWS: Final = (
    "fine", "raise", "raise-triton", "none", "too-few", "wrong-object", "error", "error-code", "wrong-name",
    "wrong-datatype", "wrong-shape", "no-output", "noise",
)  # fmt: skip


def _pair(first: str = "A", second: str = "B") -> list[dict[str, Any]]:
    values = {first: [1.0, 2.0, 3.0, 4.0], second: ONES}
    return [{"name": name, "datatype": "FP32", "shape": [1, 4], "data": data} for name, data in values.items()]


def _how(how: str, shape: tuple[int, ...] = (1, 1)) -> list[dict[str, Any]]:
    return [{"name": "HOW", "datatype": "BYTES", "shape": list(shape), "data": [how]}]


async def _chain(server: Server) -> Json:
    return (await server.infer("chain", {"id": "both", "inputs": _pair()})).inferred()


async def _chain_part(server: Server) -> Json:
    return (await server.infer("chain", {"inputs": _pair(), "outputs": [{"name": "twice_b"}]})).inferred()


async def _chain_inner(server: Server) -> Json:
    """Tensor names inside the ensemble are not its outputs."""
    return (await server.infer("chain", {"inputs": _pair(), "outputs": [{"name": "sum"}]})).inferred()


async def _chain_missing(server: Server) -> Json:
    return (await server.infer("chain", {"inputs": _pair()[:1]})).inferred()


async def _chain_metadata(server: Server) -> Json:
    return (await server.get("/v2/models/chain")).seen()


async def _chain_counters(server: Server) -> Json:
    """A request to an ensemble counts for the ensemble and for each step."""
    await server.reload("chain", "add_sub")
    await server.reload("chain")  # it was loaded before its step
    await server.infer("chain", {"inputs": _pair()})
    await asyncio.sleep(0.2)
    return [counters((await server.get(f"/v2/models/{model}/stats")).json) for model in ("chain", "add_sub")]


def _fails(how: str) -> Check:
    async def run(server: Server) -> Json:
        first = (await server.infer("broken", {"id": "x", "inputs": _how(how)})).inferred()
        again = (await server.infer("broken", {"inputs": _how("fine")})).inferred()
        return {"answer": first, "afterwards": again["status"]}

    return Check(f"failures/{how}", run, ("broken",))


async def _one_of_two(server: Server) -> Json:
    """Two requests that may share a batch: the error of one must not affect the other."""
    hows = ("fine", "error")
    answers = await asyncio.gather(*(server.infer("broken", {"inputs": _how(each)}) for each in hows))
    return [answer.inferred() for answer in answers]


async def _failed_counters(server: Server) -> Json:
    await server.reload("broken")
    for how in ("fine", "raise", "error"):
        await server.infer("broken", {"inputs": _how(how)})
    await asyncio.sleep(0.2)
    return counters((await server.get("/v2/models/broken/stats")).json)


def _chain_fails(how: str) -> Check:
    async def run(server: Server) -> Json:
        return (await server.infer("chain_broken", {"inputs": _how(how)})).inferred()

    return Check(f"ensembles/step fails by {how}", run, ("broken", "chain_broken"))


def _calls(how: str) -> Check:
    async def run(server: Server) -> Json:
        given = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}
        return (await server.infer("calls", {"inputs": [*_how(how, (1,)), given]})).inferred()

    return Check(f"ensembles/a model calls {how}", run, ("add_sub", "calls"))


def checks() -> list[Check]:
    """All checks of this module."""
    chain = ("add_sub", "chain")
    return [
        Check("ensembles/chain", _chain, chain),
        Check("ensembles/chain, one output", _chain_part, chain),
        Check("ensembles/chain, inner name", _chain_inner, chain),
        Check("ensembles/chain, input missing", _chain_missing, chain),
        Check("ensembles/metadata", _chain_metadata, chain),
        Check("statistics/ensemble", _chain_counters, chain),
        *(_fails(how) for how in HOWS),
        Check("failures/one of two", _one_of_two, ("broken",)),
        Check("statistics/failures", _failed_counters, ("broken",)),
        *(_chain_fails(how) for how in ("fine", "raise", "error")),
        *(_calls(how) for how in ("one", "both", "missing")),
    ]
