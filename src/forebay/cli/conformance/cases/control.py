"""Repository control: index, load, unload, configurations sent with a load, versions, invalid models."""

import asyncio
import base64
import json
from importlib import resources
from typing import Any, Final

from forebay.cli.conformance.cases.refused_rpc import rpc
from forebay.cli.conformance.check import Check, Json, without_paths
from forebay.cli.conformance.repository import MODELS
from forebay.cli.conformance.server import Server

REPOSITORY: Final = "/v2/repository"

GOOD: Final[dict[str, Any]] = {
    "backend": "python",
    "max_batch_size": 8,
    "input": [{"name": f"IN{each}", "data_type": "TYPE_FP32", "dims": [4]} for each in (0, 1)],
    "output": [{"name": f"OUT{each}", "data_type": "TYPE_FP32", "dims": [4]} for each in (0, 1)],
    "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
}
"""The configuration of `plain`, with batching."""


def _with(**changes: Any) -> str:
    return json.dumps({key: value for key, value in {**GOOD, **changes}.items() if value is not None})


def _input(**changes: Any) -> list[dict[str, Any]]:
    return [{**GOOD["input"][0], **changes}, GOOD["input"][1]]


SEQUENCE: Final[Json] = {"direct": {}, "control_input": []}
CONFIGS: Final[dict[str, str]] = {
    "good": _with(),
    "with its name": _with(name="plain"),
    "with another name": _with(name="other"),
    "not JSON": "hello",
    "empty": "",
    "pbtxt": 'backend: "python"',
    "unknown field": _with(colour="green"),
    "field of another type": _with(max_batch_size="many"),
    "batch size negative": _with(max_batch_size=-1),
    "no backend": _with(backend=None),
    "unknown backend": _with(backend="cobol"),
    "unknown platform": _with(backend=None, platform="cobol_plan"),
    "no inputs": _with(input=[]),
    "no outputs": _with(output=[]),
    "input twice": _with(input=[*GOOD["input"], GOOD["input"][0]]),
    "output twice": _with(output=[*GOOD["output"], GOOD["output"][0]]),
    "input without name": _with(input=_input(name="")),
    "input without type": _with(input=_input(data_type="TYPE_INVALID")),
    "input of unknown type": _with(input=_input(data_type="TYPE_FP31")),
    "input without dims": _with(input=_input(dims=[])),
    "input dims 0": _with(input=_input(dims=[0])),
    "input dims -2": _with(input=_input(dims=[-2])),
    "reshape of another size": _with(input=_input(reshape={"shape": [5]})),
    "ragged without batching": _with(max_batch_size=0, input=_input(allow_ragged_batch=True)),
    "preferred beyond the batch size": _with(dynamic_batching={"preferred_batch_size": [16]}),
    "preferred 0": _with(dynamic_batching={"preferred_batch_size": [0]}),
    "batching without batch size": _with(max_batch_size=0, dynamic_batching={"preferred_batch_size": [4]}),
    "batching both ways": _with(dynamic_batching={}, sequence_batching=SEQUENCE),
    "default priority beyond levels": _with(dynamic_batching={"priority_levels": 2, "default_priority_level": 3}),
    "no default priority": _with(dynamic_batching={"priority_levels": 2}),
    "queue policy beyond levels": _with(
        dynamic_batching={
            "priority_levels": 2,
            "default_priority_level": 1,
            "priority_queue_policy": {"3": {"max_queue_size": 1}},
        }
    ),
    "preserve ordering with levels": _with(
        dynamic_batching={"priority_levels": 2, "default_priority_level": 1, "preserve_ordering": True}
    ),
    "sequence controls none": _with(sequence_batching=SEQUENCE),
    "sequence idle negative": _with(sequence_batching={**SEQUENCE, "max_sequence_idle_microseconds": -1}),
    "instance count negative": _with(instance_group=[{"count": -1, "kind": "KIND_CPU"}]),
    "instance on a GPU": _with(instance_group=[{"count": 1, "kind": "KIND_GPU", "gpus": [0]}]),
    "instance of CPU with GPUs": _with(instance_group=[{"count": 1, "kind": "KIND_CPU", "gpus": [0]}]),
    "instance groups of one name": _with(instance_group=[{"name": "a", "kind": "KIND_CPU"}] * 2),
    "version that is not there": _with(version_policy={"specific": {"versions": [7]}}),
    "latest 0": _with(version_policy={"latest": {"num_versions": 0}}),
    "model file with a path": _with(default_model_filename="../../model.py"),
    "label file missing": _with(output=[{**GOOD["output"][0], "label_filename": "none.txt"}, GOOD["output"][1]]),
    "ensemble that also has instances": _with(
        platform="ensemble", backend=None, ensemble_scheduling={"step": [{"model_name": "add_sub"}]}
    ),
    "warm-up of unknown input": _with(
        model_warmup=[
            {
                "name": "w",
                "batch_size": 1,
                "inputs": {"IN7": {"data_type": "TYPE_FP32", "dims": [4], "zero_data": True}},
            }
        ]
    ),
    "decoupled": _with(model_transaction_policy={"decoupled": True}),
}
"""Configurations to load `plain` with; after each load the server's view of the model is compared."""


async def _load(server: Server, name: str, parameters: dict[str, Json] | None = None) -> dict[str, Json]:
    body: Json = {} if parameters is None else {"parameters": parameters}
    return (await server.post(f"{REPOSITORY}/models/{name}/load", body)).seen()


async def _unload(server: Server, name: str, parameters: dict[str, Json] | None = None) -> dict[str, Json]:
    body: Json = {} if parameters is None else {"parameters": parameters}
    return (await server.post(f"{REPOSITORY}/models/{name}/unload", body)).seen()


async def _state(server: Server, *names: str, settled: bool = True) -> Json:
    """The index rows of these models, once no load or unload is in progress."""
    rows: list[dict[str, Json]] = []
    for _ in range(100):
        index = (await server.post(f"{REPOSITORY}/index", {})).json
        rows = [row for row in index if row["name"] in names]
        if not settled or all(row.get("state") not in {"LOADING", "UNLOADING"} for row in rows):
            break
        await asyncio.sleep(0.05)
    for row in rows:
        reason = without_paths(row.pop("reason", ""))
        if reason and row.get("state") != "READY":  # Triton shows why an earlier load failed
            row["error"] = reason
    return sorted(rows, key=lambda row: (row["name"], row.get("version", "")))


def _config(name: str, config: str) -> Check:
    async def run(server: Server) -> Json:
        loaded = await _load(server, "plain", {"config": config})
        state = await _state(server, "plain")
        shown = (await server.get("/v2/models/plain/config")).seen() if loaded["status"] == 200 else None
        await _load(server, "plain")
        return {"load": loaded, "state": state, "config": shown}

    return Check(f"control/config {name}", run, ("plain",))


def _refused(name: str) -> Check:
    async def run(server: Server) -> Json:
        loaded = await _load(server, name)
        return {"load": loaded, "state": await _state(server, name)}

    return Check(f"control/load {name}", run)


async def _index(server: Server) -> Json:
    """Models of the repository that are missing in the index."""
    rows = (await server.post(f"{REPOSITORY}/index", {})).json
    return {"missing": sorted(set(MODELS) - {row["name"] for row in rows})}


async def _index_bodies(server: Server) -> Json:
    bodies: list[bytes | Json] = [b"", {"ready": True}, {"ready": "yes"}, [], b"hello"]
    seen: list[Json] = []
    for body in bodies:
        answer = (await server.post(f"{REPOSITORY}/index", body)).seen()
        if isinstance(answer.get("body"), list) and body != {"ready": True}:
            del answer["body"]
        seen.append(answer)
    return seen


async def _life(server: Server) -> Json:
    """Load twice, unload twice, and the responses after each step."""
    steps: list[Json] = []
    for step in ("load", "load", "unload", "unload"):
        answer = await (_load if step == "load" else _unload)(server, "plain")
        state = await _state(server, "plain")
        ready = (await server.get("/v2/models/plain/ready")).status
        metadata = (await server.get("/v2/models/plain")).seen()
        infer = (await server.infer("plain", {"inputs": []})).seen()
        steps.append({"answer": answer, "state": state, "ready": ready, "metadata": metadata, "infer": infer})
    return steps


async def _unknown(server: Server) -> Json:
    return [
        await _load(server, "no_such_model"),
        await _unload(server, "no_such_model"),
        (await server.get(f"{REPOSITORY}/index")).seen(),
        (await server.get(f"{REPOSITORY}/models/plain/load")).seen(),
        (await server.post(f"{REPOSITORY}/models/plain/reload", {})).seen(),
        (await server.post(f"{REPOSITORY}/models/plain/load", b"hello")).seen(),
        (await server.post(f"{REPOSITORY}/models/plain/load", {"parameters": {"colour": "green"}})).seen(),
        (await server.post(f"{REPOSITORY}/models/plain/load", {"parameters": {"config": 7}})).seen(),
        (await server.post(f"{REPOSITORY}/models/plain/unload", {"parameters": {"unload_dependents": "yes"}})).seen(),
    ]


async def _kept(server: Server) -> Json:
    """After a failed reload the previous model still serves; earlier overrides, which Triton keeps, are undone."""
    await _load(server, "plain", {"config": _with(max_batch_size=0)})
    failed = await _load(server, "plain", {"config": _with(backend="cobol")})
    given = [{"name": f"IN{each}", "datatype": "FP32", "shape": [4], "data": [1.0] * 4} for each in (0, 1)]
    after = (await server.infer("plain", {"inputs": given})).inferred()
    return {"reload": failed, "state": await _state(server, "plain"), "infer": after}


def _file(name: str) -> str:
    source = resources.files("forebay.cli.conformance.models") / f"{name}.py"
    return base64.b64encode(source.read_bytes()).decode()


async def _files(server: Server) -> Json:
    """A model whose files are sent with the load."""
    config = _with(input=[{"name": "IN", "data_type": "TYPE_FP32", "dims": [4]}], output=[
        {"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]}])  # fmt: skip
    without = await _load(server, "posted", {"file:1/model.py": _file("echo")})
    broken = await _load(server, "posted", {"config": config, "file:1/model.py": "???"})
    loaded = await _load(server, "posted", {"config": config, "file:1/model.py": _file("echo")})
    given = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}
    answer = (await server.infer("posted", {"inputs": [given]})).inferred()
    escaped = await _load(server, "posted", {"config": config, "file:../../../escaped": _file("echo")})
    await _unload(server, "posted")
    return {
        "without config": without,
        "not base64": broken["status"],
        "load": loaded,
        "infer": answer,
        "outside": escaped,
    }


async def _dependents(server: Server) -> Json:
    """Loading an ensemble loads its steps; unloading with dependents unloads them too."""
    for name in ("chain", "add_sub"):
        await _unload(server, name)
    names = ("add_sub", "chain")
    await _state(server, *names)
    loaded = await _load(server, "chain")
    one = await _state(server, *names)
    plain = await _unload(server, "chain")
    two = await _state(server, *names)
    await _load(server, "chain")
    whole = await _unload(server, "chain", {"unload_dependents": True})
    three = await _state(server, *names)
    return [loaded, one, plain, two, whole, three]


async def _needed(server: Server) -> Json:
    """What remains of an ensemble whose step is unloaded."""
    await _load(server, "chain")
    gone = await _unload(server, "add_sub")
    state = await _state(server, "add_sub", "chain")
    given = [{"name": each, "datatype": "FP32", "shape": [1, 4], "data": [1.0] * 4} for each in ("A", "B")]
    answer = (await server.infer("chain", {"inputs": given})).inferred()
    await _unload(server, "chain")
    return {"unload": gone, "state": state, "infer": answer}


def _versions(policy: str) -> Check:
    name = f"versions_{policy}"

    async def run(server: Server) -> Json:
        given = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [0]}
        answers: dict[str, Json] = {}
        for version in ("", "1", "2", "3", "03"):
            answer = (await server.infer(name, {"inputs": [given]}, version=version)).inferred()
            answers[version or "latest"] = answer
        stats = (await server.get(f"/v2/models/{name}/stats")).json["model_stats"]
        return {
            "infer": answers,
            "metadata": (await server.get(f"/v2/models/{name}")).seen(),
            "index": await _state(server, name),
            "stats": sorted(row["version"] for row in stats),
        }

    return Check(f"control/versions {policy}", run, (name,))


async def _in_place(server: Server) -> Json:
    """Increasing the instance count keeps the running instances, with their counters."""
    given = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [0]}
    before = (await server.infer("serial", {"inputs": [given]})).inferred()
    config = (await server.get("/v2/models/serial/config")).json
    config["instance_group"][0]["count"] = 2
    loaded = await _load(server, "serial", {"config": json.dumps(config)})
    start = asyncio.get_running_loop().time()
    both = await asyncio.gather(*(server.infer("serial", {"inputs": [given]}) for _ in range(2)))
    took_s = asyncio.get_running_loop().time() - start
    counts = sorted(each.json["outputs"][0]["data"][0] for each in both)
    return {"before": before, "load": loaded, "executions": counts, "together": took_s < 0.18}


async def _by_rpc(server: Server) -> Json:
    """The same over gRPC."""
    calls: list[tuple[str, dict[str, Json]]] = [
        ("RepositoryModelLoad", {"model_name": "plain"}),
        ("RepositoryModelLoad", {"model_name": "plain", "parameters": {"config": {"string_param": _with()}}}),
        ("RepositoryModelLoad", {"model_name": "plain", "parameters": {"config": {"int64_param": "7"}}}),
        ("RepositoryModelLoad", {"model_name": "plain", "parameters": {"colour": {"string_param": "green"}}}),
        ("RepositoryModelLoad", {"model_name": "bad_syntax"}),
        ("RepositoryModelUnload", {"model_name": "plain", "parameters": {"unload_dependents": {"bool_param": True}}}),
        ("RepositoryModelUnload", {"model_name": "plain", "parameters": {"colour": {"bool_param": True}}}),
    ]
    return [await rpc(server).call(name, message) for name, message in calls]


async def _ready(server: Server) -> Json:
    """Whether the server reports ready although a model failed to load."""
    await _load(server, "bad_start")
    return (await server.get("/v2/health/ready")).status


async def _index_by_rpc(server: Server) -> Json:
    """The index over gRPC has the same rows."""
    seen = await rpc(server).call("RepositoryIndex", {"ready": True})
    return seen


def checks() -> list[Check]:
    """All checks of this module."""
    return [
        *(_config(name, config) for name, config in CONFIGS.items()),
        *(_refused(model.name) for model in MODELS.values() if not model.loads),
        Check("control/index", _index),
        Check("control/index, bodies", _index_bodies),
        Check("control/index over gRPC", _index_by_rpc, grpc=True),
        Check("control/life", _life),
        Check("control/unknown", _unknown),
        Check("control/failed reload", _kept, ("plain",)),
        Check("control/files", _files),
        Check("control/dependents", _dependents),
        Check("control/step unloaded", _needed),
        *(_versions(policy) for policy in ("specific", "all", "latest")),
        Check("control/instances in place", _in_place, ("serial",)),
        Check("control/over gRPC", _by_rpc, grpc=True),
        Check("control/ready in spite of a bad model", _ready),
    ]
