"""Checks for any server of the protocol, with whatever models it has. They change nothing, and all their inferences
must be rejected: no model runs."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from forebay.cli.conformance.check import Check, Deviation, Json, Level, Skip
from forebay.cli.conformance.repository import TYPES
from forebay.cli.conformance.server import HEADER_LENGTH, Answer, Server

ABSENT: Final = "no-such-model-of-forebay-conformance"
ANY: Final = "any/"
"""Begins the names of checks for servers with any models."""
ABSENT_VERSION: Final = "987654321"
LISTED_MAX: Final = 20
"""Maximum number of models per check."""

Run = Callable[[Server], Awaitable[None]]


def _expect(holds: bool, expected: str, found: object, level: Level = Level.MUST) -> None:
    if not holds:
        raise Deviation(expected, found, level)


def _document(answer: Answer, status: int = 200) -> dict[str, Any]:
    _expect(answer.status == status, f"status {status}", f"{answer.status} {answer.body[:200]!r}")
    body = answer.json
    if not isinstance(body, dict):
        raise Deviation("a JSON object", body)
    return body


def is_error(answer: Answer, statuses: Sequence[int], what: str) -> None:
    """A protocol error: a JSON object with a text in `error`; 501 is allowed for features that the server lacks."""
    found = f"{answer.status} {answer.body[:200]!r}"
    _expect(400 <= answer.status < 600, f"an error for {what}", found)
    body = answer.json
    _expect(
        isinstance(body, dict) and isinstance(body.get("error"), str) and bool(body["error"]),
        'a body {"error": text}',
        found,
    )
    expected = f"status {' or '.join(map(str, statuses))} for {what}"
    _expect(answer.status in statuses or answer.status == 501, expected, found, Level.SHOULD)


def _has(document: Mapping[str, Any], fields: Mapping[str, type], what: str) -> None:
    for field, kind in fields.items():
        _expect(isinstance(document.get(field), kind), f"{what} has {field} ({kind.__name__})", document)


def claims(server: Server, *extensions: str) -> None:
    """Skip the check unless the server claims one of the extensions; KServe names its own `…_extension`."""
    if not {each.removesuffix("_extension") for each in server.extensions}.intersection(extensions):
        raise Skip(f"the server does not claim the extension {extensions[0]}")


def _models(server: Server) -> Sequence[str]:
    if not server.models:
        raise Skip("no model was found: name one with --model")
    return server.models[:LISTED_MAX]


async def _live(server: Server) -> None:
    answer = await server.get("/v2/health/live")
    _expect(answer.status == 200, "status 200", answer.status)


async def _ready(server: Server) -> None:
    answer = await server.get("/v2/health/ready")
    _expect(answer.status in {200, 400, 503}, "status 200, or one that says not ready", answer.status)


async def _metadata(server: Server) -> None:
    body = _document(await server.get("/v2"))
    _has(body, {"name": str, "version": str, "extensions": list}, "server metadata")
    _expect(all(isinstance(each, str) for each in body["extensions"]), "extensions are strings", body["extensions"])


async def _model_metadata(server: Server) -> None:
    for name in _models(server):
        body = _document(await server.get(f"/v2/models/{name}"))
        _has(body, {"name": str, "platform": str, "inputs": list, "outputs": list}, "model metadata")
        _expect(body["name"] == name, f"name {name}", body["name"])
        versions = body.get("versions") or []
        listed = isinstance(versions, list) and all(isinstance(each, str) for each in versions)
        _expect(listed, "versions are a list of strings", versions)
        for tensor in [*body["inputs"], *body["outputs"]]:
            _has(tensor, {"name": str, "datatype": str, "shape": list}, "a tensor of model metadata")
            _expect(tensor["datatype"] in TYPES, "a datatype of the protocol", tensor)
            sizes = tensor["shape"]
            _expect(all(isinstance(size, int) and size >= -1 for size in sizes), "sizes of -1 or more", tensor)


async def _versions(server: Server) -> None:
    for name in _models(server):
        versions = _document(await server.get(f"/v2/models/{name}")).get("versions") or []
        for version in versions[:LISTED_MAX]:
            body = _document(await server.get(f"/v2/models/{name}/versions/{version}"))
            _expect(body.get("name") == name, f"name {name}", body)
            ready = await server.get(f"/v2/models/{name}/versions/{version}/ready")
            _expect(ready.status == 200, f"{name} version {version} is ready", ready.status)


async def _model_ready(server: Server) -> None:
    for name in _models(server):
        answer = await server.get(f"/v2/models/{name}/ready")
        _expect(answer.status == 200, f"{name} is ready", answer.status)


async def _absent(server: Server) -> None:
    is_error(await server.get(f"/v2/models/{ABSENT}"), [404, 400], "metadata of an unknown model")
    ready = await server.get(f"/v2/models/{ABSENT}/ready")
    _expect(400 <= ready.status < 600, "an unknown model is not ready", ready.status)
    is_error(await server.infer(ABSENT, {"inputs": []}), [404, 400], "inference of an unknown model")


async def _absent_version(server: Server) -> None:
    name = _models(server)[0]
    at = f"/v2/models/{name}/versions/{ABSENT_VERSION}"
    is_error(await server.get(at), [404, 400], "metadata of an unknown version")
    ready = await server.get(f"{at}/ready")
    _expect(400 <= ready.status < 600, "an unknown version is not ready", ready.status)


async def _unknown_path(server: Server) -> None:
    answer = await server.get("/v2/no/such/path")
    _expect(answer.status in {400, 404, 405}, "status 404", answer.status)


async def zeros(server: Server) -> tuple[str, list[dict[str, Any]]]:
    """A model with matching inputs: zeros, dynamic dimensions of size 1, as flat JSON data."""
    name = _models(server)[0]
    given = []
    for tensor in _document(await server.get(f"/v2/models/{name}"))["inputs"]:
        shape = [max(1, size) for size in tensor["shape"]]
        count = 1
        for size in shape:
            count *= size
        if count > 1_000_000:
            raise Skip(f"{name} takes {count} elements")
        zero: Any = {"BYTES": "", "BOOL": False}.get(tensor["datatype"], 0)
        given.append({"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape, "data": [zero] * count})
    return name, given


def _damaged(damage: Callable[[list[dict[str, Any]]], Json], what: str) -> Run:
    async def run(server: Server) -> None:
        name, inputs = await zeros(server)
        if not inputs or not inputs[0]["shape"]:
            raise Skip(f"{name} has no input with dimensions")
        is_error(await server.infer(name, damage(inputs)), [400], what)

    return run


def _first(inputs: list[dict[str, Any]], **changes: Json) -> Json:
    first = {key: value for key, value in {**inputs[0], **changes}.items() if value is not None}
    return {"inputs": [first, *inputs[1:]]}


def _another_type(inputs: list[dict[str, Any]]) -> Json:
    other = "INT32" if inputs[0]["datatype"] != "INT32" else "FP32"
    return _first(inputs, datatype=other, data=[0] * len(inputs[0]["data"]))


DAMAGES: Final[dict[str, Callable[[list[dict[str, Any]]], Json]]] = {
    "no inputs field": lambda _: {},
    "inputs that are no list": lambda _: {"inputs": "none"},
    "no inputs": lambda _: {"inputs": []},
    "an input of an unknown name": lambda inputs: _first(inputs, name="no-such-input"),
    "an input without name": lambda inputs: _first(inputs, name=None),
    "an input without datatype": lambda inputs: _first(inputs, datatype=None),
    "an unknown datatype": lambda inputs: _first(inputs, datatype="FP31"),
    "another datatype": _another_type,
    "an input without shape": lambda inputs: _first(inputs, shape=None),
    "a negative shape": lambda inputs: _first(inputs, shape=[-1 for _ in inputs[0]["shape"]]),
    "a shape of too many dimensions": lambda inputs: _first(inputs, shape=[1, 1, 1, 1, *inputs[0]["shape"]]),
    "too few elements": lambda inputs: _first(inputs, data=inputs[0]["data"][1:]),
    "too many elements": lambda inputs: _first(inputs, data=[*inputs[0]["data"], *inputs[0]["data"][:1]]),
    "an unknown output": lambda inputs: {"inputs": inputs, "outputs": [{"name": "no-such-output"}]},
}
"""What is wrong, and how to derive it from valid inputs."""


async def _not_json(server: Server) -> None:
    name = _models(server)[0]
    for body in (b"", b"hello", b'{"inputs": ['):
        is_error(await server.ask("POST", f"/v2/models/{name}/infer", body), [400], f"the body {body!r}")


async def _binary_header(server: Server) -> None:
    claims(server, "binary_tensor_data")
    name = _models(server)[0]
    for length in ("-1", "many", "1000000"):
        answer = await server.ask("POST", f"/v2/models/{name}/infer", b'{"inputs": []}', {HEADER_LENGTH: length})
        is_error(answer, [400], f"{HEADER_LENGTH}: {length}")


async def _config(server: Server) -> None:
    claims(server, "model_configuration")
    for name in _models(server):
        body = _document(await server.get(f"/v2/models/{name}/config"))
        _expect(body.get("name") == name, f"name {name}", body.get("name"))
        _has(body, {"max_batch_size": int, "input": list, "output": list}, "a configuration")
        described = _document(await server.get(f"/v2/models/{name}"))
        for side in ("input", "output"):
            known, named = (sorted(each["name"] for each in rows) for rows in (described[f"{side}s"], body[side]))
            _expect(known == named, f"{side} of {name} as in its metadata: {known}", named)
    is_error(await server.get(f"/v2/models/{ABSENT}/config"), [404, 400], "configuration of an unknown model")


async def _statistics(server: Server) -> None:
    claims(server, "statistics")
    for name in _models(server):
        rows = _document(await server.get(f"/v2/models/{name}/stats")).get("model_stats")
        _expect(isinstance(rows, list) and bool(rows), "model_stats with a row", rows)
        for row in rows or []:
            fields = {"name": str, "version": str, "inference_count": int, "execution_count": int}
            _has(row, {**fields, "inference_stats": dict, "batch_stats": list}, "statistics")
            _expect(row["name"] == name, f"name {name}", row["name"])
            for part in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"):
                _has(row["inference_stats"].get(part, {}), {"count": int, "ns": int}, f"inference_stats.{part}")
    is_error(await server.get(f"/v2/models/{ABSENT}/stats"), [404, 400], "statistics of an unknown model")


async def _index(server: Server) -> None:
    claims(server, "model_repository")
    for body in ({}, {"ready": True}):
        answer = await server.post("/v2/repository/index", body)
        rows = answer.json
        if answer.status != 200 or not isinstance(rows, list):
            raise Deviation("status 200 with a list", f"{answer.status} {answer.body[:200]!r}")
        for row in rows:
            _has(row, {"name": str}, "a row of the index")
        absent = {*server.models}.difference(row["name"] for row in rows)
        _expect(not absent, f"rows of the models that are ready, {', '.join(sorted(absent))} too", rows)
        not_ready = [row for row in rows if row.get("state") != "READY"]
        _expect(not body or not not_ready, "only models that are ready", not_ready)


async def _load_absent(server: Server) -> None:
    claims(server, "model_repository")
    answer = await server.post(f"/v2/repository/models/{ABSENT}/load", {})
    is_error(answer, [400, 404, 500], "loading an unknown model")


async def _shared_memory(server: Server) -> None:
    claims(server, "system_shared_memory")
    answer = await server.get("/v2/systemsharedmemory/status")
    _expect(answer.status == 200 and isinstance(answer.json, list), "a list of regions", answer.json)
    is_error(await server.get(f"/v2/systemsharedmemory/region/{ABSENT}/status"), [404, 400], "an unknown region")


async def _settings(server: Server) -> None:
    claims(server, "trace", "logging")
    for extension, path in (("trace", "/v2/trace/setting"), ("logging", "/v2/logging")):
        if extension in server.extensions:
            _document(await server.get(path))


GENERIC: Final[dict[str, Run]] = {
    "health/live": _live,
    "health/ready": _ready,
    "metadata/server": _metadata,
    "metadata/models": _model_metadata,
    "metadata/versions": _versions,
    "metadata/models are ready": _model_ready,
    "metadata/unknown model": _absent,
    "metadata/unknown version": _absent_version,
    "http/unknown path": _unknown_path,
    "refuses/not JSON": _not_json,
    **{f"refuses/{what}": _damaged(damage, what) for what, damage in DAMAGES.items()},
    "refuses/wrong header of binary data": _binary_header,
    "extension/configuration": _config,
    "extension/statistics": _statistics,
    "extension/index": _index,
    "extension/loading an unknown model": _load_absent,
    "extension/shared memory": _shared_memory,
    "extension/settings": _settings,
}
"""HTTP checks that run no model."""


def checks() -> list[Check]:
    """All checks of this module."""
    return [Check(f"{ANY}{name}", run) for name, run in GENERIC.items()]
