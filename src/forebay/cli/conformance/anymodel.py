"""Checks for any server that need permission: real inferences of a model that the user has named, and gRPC."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.cli.conformance.check import Check, Deviation, Json, Level, Skip
from forebay.cli.conformance.generic import ABSENT, ABSENT_VERSION, ANY, Run, claims, is_error, zeros
from forebay.cli.conformance.server import Server
from forebay.cli.conformance.tensors import packed

KINDS: Final[Mapping[str, tuple[type, ...]]] = {"BOOL": (bool,), "BYTES": (str,)}
"""Kinds of JSON elements by datatype, if they are not numbers."""
NOT_IN_JSON: Final = ("BF16", "FP16")


async def _inputs(server: Server) -> tuple[str, list[dict[str, Any]]]:
    """The model that may be run, and its inputs."""
    if not server.may_infer:
        raise Skip("models are run only if one is named with --model")
    name, inputs = await zeros(server)
    tensors = [*inputs, *(await server.get(f"/v2/models/{name}")).json["outputs"]]
    halves = sorted({each["datatype"] for each in tensors}.intersection(NOT_IN_JSON))
    if halves:
        raise Skip(f"{name} has tensors of {', '.join(halves)}, which Triton's protocol does not have in JSON")
    return name, inputs


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
    name, inputs = await _inputs(server)
    seen = await _answer(server, name, {"id": "forebay 7", "inputs": inputs})
    _same(name, seen.get("model_name"), "model_name")
    _same("forebay 7", seen.get("id"), "id")
    about = (await server.get(f"/v2/models/{name}")).json
    _of_listed_version(seen, about)
    declared = {each["name"]: each for each in about["outputs"]}
    _same(sorted(declared), [each["name"] for each in seen["outputs"]], "outputs")
    for output in seen["outputs"]:
        known, what = declared[output["name"]], output["name"]
        _same(known["datatype"], output["datatype"], f"datatype of {what}")
        if not _fits(output["shape"], known["shape"]):
            raise Deviation(f"shape of {what} that fits {known['shape']}", output["shape"])
        values = flat(output["data"])
        _same(math.prod(output["shape"]), len(values), f"elements of {what}")
        kinds = KINDS.get(output["datatype"], (int,) if "INT" in output["datatype"] else (int, float))
        if not all(type(each) in kinds for each in values):
            raise Deviation(f"elements of {what} as {' or '.join(each.__name__ for each in kinds)}", values)


def _of_listed_version(seen: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """The version is optional in both; if it is there, it is text, and one that the model has."""
    version = seen.get("model_version") or ""
    versions = about.get("versions")
    if not isinstance(version, str) or (version and versions and version not in versions):
        raise Deviation(f"model_version, if any, is one of {versions}", version)


def _fits(shape: Sequence[int], declared: Sequence[int]) -> bool:
    same = len(shape) == len(declared)
    return same and all(known in (-1, size) for size, known in zip(shape, declared, strict=True))


async def _version(server: Server) -> None:
    """A listed version answers, as itself; any other one is refused."""
    name, inputs = await _inputs(server)
    for version in (await server.get(f"/v2/models/{name}")).json.get("versions") or []:
        seen = (await server.infer(name, {"inputs": inputs}, version=version)).inferred()
        if seen["status"] != 200 or seen.get("model_version") not in (version, "", None):
            raise Deviation(f"status 200 from version {version}", seen)
    absent = await server.infer(name, {"inputs": inputs}, version=ABSENT_VERSION)
    is_error(absent, [404, 400], "inference of an unknown version")


async def _one_output(server: Server) -> None:
    name, inputs = await _inputs(server)
    wanted = (await server.get(f"/v2/models/{name}")).json["outputs"][-1]["name"]
    seen = await _answer(server, name, {"inputs": inputs, "outputs": [{"name": wanted}]})
    _same([wanted], [each["name"] for each in seen["outputs"]], "outputs")


async def _no_id(server: Server) -> None:
    name, inputs = await _inputs(server)
    seen = await _answer(server, name, {"inputs": inputs})
    _same(False, bool(seen.get("id")), "an id that was not given", Level.SHOULD)


def _parts(inputs: Sequence[Mapping[str, Any]]) -> list[bytes]:
    return [
        packed(each["datatype"], [str(v).encode() if isinstance(v, str) else v for v in each["data"]])
        for each in inputs
    ]


async def _binary(server: Server) -> None:
    """Binary inputs and outputs carry the same values as JSON ones."""
    claims(server, "binary_tensor_data")
    name, inputs = await _inputs(server)
    by_json, again = [await _answer(server, name, {"inputs": inputs}) for _ in range(2)]
    if by_json["outputs"] != again["outputs"]:
        raise Skip(f"{name} does not give the same answer twice")
    parts = _parts(inputs)
    heads = [
        {
            **{key: value for key, value in each.items() if key != "data"},
            "parameters": {"binary_data_size": len(part)},
        }
        for each, part in zip(inputs, parts, strict=True)
    ]
    body = {"inputs": heads, "parameters": {"binary_data_output": True}}
    by_bytes = await _answer(server, name, body, b"".join(parts))
    _same(None, by_bytes.get("left over"), "bytes behind the outputs")
    for one, other in zip(by_json["outputs"], by_bytes["outputs"], strict=True):
        _same(one["shape"], other["shape"], f"shape of {one['name']}")
        _same(flat(one["data"]), flat(other["data"]), f"{one['name']} in binary")
    for output in by_bytes["outputs"]:
        binary = "binary_data_size" in (output.get("parameters") or {})
        _same(True, binary, f"{output['name']} in binary, as requested:", Level.SHOULD)


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
            if seen.get(key) != value:
                raise Deviation(f"{key} {value!r}", seen)

    return run


async def _rpc_metadata(server: Server) -> None:
    assert server.rpc is not None
    for name in server.models:
        seen = await server.rpc.call("ModelMetadata", {"name": name})
        if seen["code"] != "OK":
            raise Deviation("code 'OK'", seen)
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


async def _rpc_ready(server: Server) -> None:
    assert server.rpc is not None
    for name in server.models:
        seen = await server.rpc.call("ModelReady", {"name": name})
        if seen.get("ready") is not True:
            raise Deviation(f"{name} is ready", seen)
    seen = await server.rpc.call("ModelReady", {"name": ABSENT})
    if seen.get("ready"):
        raise Deviation("an unknown model is not ready", seen)


async def _rpc_infer(server: Server) -> None:
    """The outputs are those of HTTP; their values are compared if they come as raw contents."""
    from forebay.cli.conformance import rpc

    assert server.rpc is not None
    name, inputs = await _inputs(server)
    tensors = [
        (each["name"], each["datatype"], each["shape"], part)
        for each, part in zip(inputs, _parts(inputs), strict=True)
    ]
    by_http = await _answer(server, name, {"inputs": inputs})
    seen: Any = await server.rpc.send("ModelInfer", rpc.infer(name, tensors, id="forebay 7"))
    again = await _answer(server, name, {"inputs": inputs})
    if by_http["outputs"] != again["outputs"]:
        raise Skip(f"{name} does not give the same answer twice")
    if seen["code"] != "OK":
        raise Deviation("code 'OK'", seen)
    _same(name, seen["model"], "model_name")
    _same("forebay 7", seen.get("id"), "id")
    for key in ("name", "datatype", "shape"):
        _same(
            [each[key] for each in by_http["outputs"]], [each[key] for each in seen["outputs"]], f"{key} of outputs"
        )
    for one, other in zip(by_http["outputs"], seen["outputs"], strict=True):
        if "raw" in other:
            _same(flat(one["data"]), other["raw"], f"{one['name']} over gRPC")


CALLS: Final[dict[str, Run]] = {
    "live": _call("ServerLive", {}, code="OK", live=True),
    "ready": _call("ServerReady", {}, code="OK"),
    "metadata": _call("ServerMetadata", {}, code="OK"),
    "metadata of an unknown model": _call("ModelMetadata", {"name": ABSENT}, code="NOT_FOUND"),
    "inference of an unknown model": _call("ModelInfer", {"model_name": ABSENT}, code="NOT_FOUND"),
    "metadata equals HTTP's": _rpc_metadata,
    "models are ready": _rpc_ready,
    "inference equals HTTP's": _rpc_infer,
}
RUNS: Final[dict[str, Run]] = {
    "names and datatypes": _names,
    "one output": _one_output,
    "no id": _no_id,
    "version": _version,
    "binary": _binary,
}


def checks() -> list[Check]:
    """All checks of this module."""
    return [
        *(Check(f"{ANY}infer/{name}", run) for name, run in RUNS.items()),
        *(Check(f"{ANY}grpc/{name}", run, grpc=True) for name, run in CALLS.items()),
    ]
