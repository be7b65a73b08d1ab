"""Checks for any server that need permission: real inferences of a model that the user has named, and gRPC."""

from collections.abc import Mapping
from typing import Any, Final

from forebay.cli.conformance.check import Check, Deviation, Json, Level, Skip
from forebay.cli.conformance.generic import ABSENT, Run, claims, zeros
from forebay.cli.conformance.server import Server
from forebay.cli.conformance.tensors import packed


def _allowed(server: Server) -> None:
    if not server.may_infer:
        raise Skip("models are run only if one is named with --model")


def _same(expected: Json, found: Json, what: str, level: Level = Level.MUST) -> None:
    if expected != found:
        raise Deviation(f"{what} {expected!r}", found, level)


async def _answer(server: Server, name: str, body: Json, binary: bytes = b"") -> dict[str, Any]:
    seen = (await server.infer(name, body, binary)).inferred()
    if seen["status"] != 200 or not isinstance(seen.get("outputs"), list):
        raise Deviation("status 200 with outputs", seen)
    return seen


async def _names(server: Server) -> None:
    """The response names the model, its outputs and their datatypes as the metadata does."""
    _allowed(server)
    name, inputs = await zeros(server)
    seen = await _answer(server, name, {"id": "forebay 7", "inputs": inputs})
    _same(name, seen.get("model_name"), "model_name")
    _same("forebay 7", seen.get("id"), "id")
    declared = {each["name"]: each for each in (await server.get(f"/v2/models/{name}")).json["outputs"]}
    for output in seen["outputs"]:
        _same(declared.get(output["name"], {}).get("datatype"), output["datatype"], f"datatype of {output['name']}")
        count = 1
        for size in output["shape"]:
            count *= size
        _same(count, len(flat(output["data"])), f"elements of {output['name']}")


async def _one_output(server: Server) -> None:
    _allowed(server)
    name, inputs = await zeros(server)
    wanted = (await server.get(f"/v2/models/{name}")).json["outputs"][-1]["name"]
    seen = await _answer(server, name, {"inputs": inputs, "outputs": [{"name": wanted}]})
    _same([wanted], [each["name"] for each in seen["outputs"]], "outputs")


async def _no_id(server: Server) -> None:
    _allowed(server)
    name, inputs = await zeros(server)
    seen = await _answer(server, name, {"inputs": inputs})
    _same(False, bool(seen.get("id")), "an id that was not given", Level.SHOULD)


async def _binary(server: Server) -> None:
    """Binary inputs and outputs carry the same values as JSON ones."""
    _allowed(server)
    claims(server, "binary_tensor_data")
    name, inputs = await zeros(server)
    by_json = await _answer(server, name, {"inputs": inputs})
    parts = [
        packed(each["datatype"], [str(v).encode() if isinstance(v, str) else v for v in each["data"]])
        for each in inputs
    ]
    heads = [
        {
            **{key: value for key, value in each.items() if key != "data"},
            "parameters": {"binary_data_size": len(part)},
        }
        for each, part in zip(inputs, parts, strict=True)
    ]
    body = {"inputs": heads, "parameters": {"binary_data_output": True}}
    by_bytes = await _answer(server, name, body, b"".join(parts))
    for one, other in zip(by_json["outputs"], by_bytes["outputs"], strict=True):
        _same(one["shape"], other["shape"], f"shape of {one['name']}")
        _same(flat(one["data"]), flat(other["data"]), f"{one['name']} in binary")


def flat(data: Json) -> list[Json]:
    """The elements of nested lists."""
    if isinstance(data, list):
        return [each for inner in data for each in flat(inner)]
    return [data]


def _call(method: str, message: Mapping[str, Json], **expected: Json) -> Run:
    async def run(server: Server) -> None:
        assert server.rpc is not None
        seen = await server.rpc.call(method, message)
        for key, value in expected.items():
            _same(value, seen.get(key), key)

    return run


async def _rpc_metadata(server: Server) -> None:
    assert server.rpc is not None
    for name in server.models:
        seen = await server.rpc.call("ModelMetadata", {"name": name})
        http = (await server.get(f"/v2/models/{name}")).json
        for side in ("inputs", "outputs"):
            by_rpc: Any = seen.get(side, [])
            shown = [
                (each["name"], each["datatype"], [int(size) for size in each.get("shape", [])]) for each in by_rpc
            ]
            _same(
                [(each["name"], each["datatype"], each["shape"]) for each in http[side]],
                shown,
                f"{side} of {name}",
            )


CALLS: Final[dict[str, Run]] = {
    "live": _call("ServerLive", {}, code="OK", live=True),
    "ready": _call("ServerReady", {}, code="OK"),
    "metadata": _call("ServerMetadata", {}, code="OK"),
    "metadata of an unknown model": _call("ModelMetadata", {"name": ABSENT}, code="NOT_FOUND"),
    "inference of an unknown model": _call("ModelInfer", {"model_name": ABSENT}, code="NOT_FOUND"),
    "metadata equals HTTP's": _rpc_metadata,
}
RUNS: Final[dict[str, Run]] = {
    "names and datatypes": _names,
    "one output": _one_output,
    "no id": _no_id,
    "binary": _binary,
}


def checks() -> list[Check]:
    """All checks of this module."""
    return [
        *(Check(f"any/infer/{name}", run) for name, run in RUNS.items()),
        *(Check(f"any/grpc/{name}", run, grpc=True) for name, run in CALLS.items()),
    ]
