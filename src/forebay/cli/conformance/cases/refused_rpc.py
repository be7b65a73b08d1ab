"""gRPC calls, valid and invalid."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.cli.conformance.check import Check, Json
from forebay.cli.conformance.server import Server
from forebay.cli.conformance.tensors import packed

if TYPE_CHECKING:
    from forebay.cli.conformance.rpc import Rpc

RAW: Final = packed("FP32", [1.0] * 4)
ONES: Final = [1.0] * 4
Inputs = list[tuple[str, str, Sequence[int], Any]]
GOOD: Final[Inputs] = [("IN0", "FP32", [1, 4], RAW), ("IN1", "FP32", [1, 4], RAW)]

INFERENCES: Final[dict[str, tuple[Inputs, dict[str, Any]]]] = {
    "right": (GOOD, {}),
    "typed": ([("IN0", "FP32", [1, 4], ONES), ("IN1", "FP32", [1, 4], ONES)], {}),
    "typed and raw": ([("IN0", "FP32", [1, 4], ONES), GOOD[1]], {}),
    "one output": (GOOD, {"outputs": ["OUT1"]}),
    "id": (GOOD, {"id": "order 7"}),
    "version 1": (GOOD, {"model_version": "1"}),
    "version 9": (GOOD, {"model_version": "9"}),
    "version x": (GOOD, {"model_version": "x"}),
    "unknown model": (GOOD, {"model": "no_such_model"}),
    "no model": (GOOD, {"model": ""}),
    "no inputs": ([], {}),
    "one input missing": (GOOD[:1], {}),
    "input twice": ([*GOOD, GOOD[0]], {}),
    "input unknown": ([*GOOD, ("IN7", "FP32", [1, 4], RAW)], {}),
    "output unknown": (GOOD, {"outputs": ["OUT7"]}),
    "output twice": (GOOD, {"outputs": ["OUT0", "OUT0"]}),
    "datatype another": ([("IN0", "INT32", [1, 4], RAW), GOOD[1]], {}),
    "datatype unknown": ([("IN0", "FP31", [1, 4], RAW), GOOD[1]], {}),
    "datatype empty": ([("IN0", "", [1, 4], RAW), GOOD[1]], {}),
    "shape another": ([("IN0", "FP32", [1, 5], packed("FP32", [1.0] * 5)), GOOD[1]], {}),
    "shape negative": ([("IN0", "FP32", [-1, 4], RAW), GOOD[1]], {}),
    "shape empty": ([("IN0", "FP32", [], RAW), GOOD[1]], {}),
    "shape huge": ([("IN0", "FP32", [1, 4_000_000_000_000], RAW), GOOD[1]], {}),
    "shape that overflows": ([("IN0", "FP32", [2**62, 2**62], RAW), GOOD[1]], {}),
    "batch too large": ([(name, "FP32", [9, 4], RAW * 9) for name in ("IN0", "IN1")], {}),
    "batch of none": ([(name, "FP32", [0, 4], b"") for name in ("IN0", "IN1")], {}),
    "batches that differ": ([("IN0", "FP32", [2, 4], RAW * 2), GOOD[1]], {}),
    "raw too short": ([("IN0", "FP32", [1, 4], RAW[:12]), GOOD[1]], {}),
    "raw too long": ([("IN0", "FP32", [1, 4], RAW * 2), GOOD[1]], {}),
    "raw missing": ([GOOD[0], ("IN1", "FP32", [1, 4], None)], {}),
    "typed too short": ([("IN0", "FP32", [1, 4], ONES[:3]), ("IN1", "FP32", [1, 4], ONES)], {}),
    "no contents": ([("IN0", "FP32", [1, 4], None), ("IN1", "FP32", [1, 4], None)], {}),
    "more raw than inputs": (GOOD, {"raw_input_contents": [RAW]}),
    "priority of a model without": (GOOD, {"parameters": {"priority": 1}}),
    "priority a string": (GOOD, {"parameters": {"priority": "high"}}),
    "timeout a string": (GOOD, {"parameters": {"timeout": "soon"}}),
    "sequence start a number": (GOOD, {"parameters": {"sequence_id": 5, "sequence_start": 1}}),
    "sequence id a boolean": (GOOD, {"parameters": {"sequence_id": True}}),
    "parameter of each kind": (GOOD, {"parameters": {"a": True, "b": 7, "c": "text", "d": 1.5}}),
    "reserved parameter": (GOOD, {"parameters": {"triton_anything": 1}}),
    "shared memory unknown": (GOOD, {"parameters": {"shared_memory_region": "nowhere"}}),
}
"""ModelInfer requests for `add_sub`."""

TYPED: Final[dict[str, list[Any]]] = {
    "BOOL": [True, False], "INT8": [-1, 1], "INT16": [-1, 1], "INT32": [-1, 1], "INT64": [-(2**63), 1],
    "UINT8": [0, 255], "UINT16": [0, 65_535], "UINT32": [0, 2**32 - 1], "UINT64": [0, 2**64 - 1],
    "FP32": [0.5, -1.0], "FP64": [0.5, -1.0], "BYTES": [b"word", b"\xff\x00"],
}  # fmt: skip
"""FP16 and BF16 have no typed contents."""

CALLS: Final[dict[str, tuple[str, dict[str, Json]]]] = {
    "live": ("ServerLive", {}),
    "metadata": ("ModelMetadata", {"name": "add_sub"}),
    "metadata of version 1": ("ModelMetadata", {"name": "add_sub", "version": "1"}),
    "metadata of version 9": ("ModelMetadata", {"name": "add_sub", "version": "9"}),
    "metadata of an unknown model": ("ModelMetadata", {"name": "no_such_model"}),
    "metadata of no model": ("ModelMetadata", {}),
    "model ready": ("ModelReady", {"name": "add_sub"}),
    "model ready of version 9": ("ModelReady", {"name": "add_sub", "version": "9"}),
    "model ready of version x": ("ModelReady", {"name": "add_sub", "version": "x"}),
    "model ready of an unknown model": ("ModelReady", {"name": "no_such_model"}),
    "config": ("ModelConfig", {"name": "add_sub"}),
    "config of version 9": ("ModelConfig", {"name": "add_sub", "version": "9"}),
    "config of an unknown model": ("ModelConfig", {"name": "no_such_model"}),
    "statistics of an unknown model": ("ModelStatistics", {"name": "no_such_model"}),
    "statistics of version 9": ("ModelStatistics", {"name": "add_sub", "version": "9"}),
    "load of an unknown model": ("RepositoryModelLoad", {"model_name": "no_such_model"}),
    "unload of an unknown model": ("RepositoryModelUnload", {"model_name": "no_such_model"}),
    "load from another repository": ("RepositoryModelLoad", {"repository_name": "x", "model_name": "add_sub"}),
    "index of another repository": ("RepositoryIndex", {"repository_name": "x"}),
    "shared memory status": ("SystemSharedMemoryStatus", {}),
    "shared memory status of an unknown region": ("SystemSharedMemoryStatus", {"name": "nowhere"}),
    "shared memory unregister of an unknown region": ("SystemSharedMemoryUnregister", {"name": "nowhere"}),
    "shared memory register of nothing": (
        "SystemSharedMemoryRegister",
        {"name": "nowhere", "key": "/forebay-conformance-none", "offset": 0, "byte_size": 16},
    ),
    "device memory status": ("CudaSharedMemoryStatus", {}),
    "trace of an unknown model": ("TraceSetting", {"model_name": "no_such_model"}),
    "trace setting unknown": ("TraceSetting", {"settings": {"colour": {"value": ["green"]}}}),
    "log setting unknown": ("LogSettings", {"settings": {"colour": {"string_param": "green"}}}),
}
"""Other calls, with their messages."""


def rpc(server: Server) -> "Rpc":
    """The gRPC client; checks that use it are skipped without a gRPC address."""
    assert server.rpc is not None
    return server.rpc


def _inference(name: str, inputs: Inputs, more: dict[str, Any]) -> Check:
    async def run(server: Server) -> Json:
        from forebay.cli.conformance.rpc import infer

        given = dict(more)
        extra = given.pop("raw_input_contents", ())
        message = infer(given.pop("model", "add_sub"), inputs, **given)
        message.raw_input_contents.extend(extra)
        return await rpc(server).send("ModelInfer", message)

    return Check(f"grpc/infer {name}", run, ("add_sub",), grpc=True)


def _typed(datatype: str, values: list[Any], raw: bool) -> Check:
    async def run(server: Server) -> Json:
        from forebay.cli.conformance.rpc import infer

        data: Any = packed(datatype, values) if raw else values
        return await rpc(server).send(
            "ModelInfer", infer("types", [(f"IN_{datatype}", datatype, [2], data)], [f"OUT_{datatype}"])
        )

    return Check(f"grpc/{'raw' if raw else 'typed'} {datatype}", run, ("types",), grpc=True)


def _call(name: str, method: str, message: dict[str, Json]) -> Check:
    async def run(server: Server) -> Json:
        return await rpc(server).call(method, message)

    return Check(f"grpc/{name}", run, ("add_sub",), grpc=True)


def checks() -> list[Check]:
    """One check per row of the tables."""
    return [
        *(_inference(name, *row) for name, row in INFERENCES.items()),
        *(_typed(datatype, values, raw) for datatype, values in TYPED.items() for raw in (False, True)),
        _typed("FP16", [0.5, -1.0], True),
        _typed("BF16", [0x3F80, 0xC000], True),
        *(_call(name, *row) for name, row in CALLS.items()),
    ]
