"""An HTTP frontend on a free port over in-memory models named after what they do."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import structlog
from tests.modelserver.openapi_check import fits
from tests.net.rig import Answer, Peer, peer, serving

from forebay.core.model import Limits
from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.statistics import BatchStatistics, Duration, ModelStatistics, ResponseStatistics
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse, Tensor, Ticket
from forebay.modelserver.http.front import HttpFront
from forebay.modelserver.http.options import BODY_BYTES_MAX, FrontOptions
from forebay.modelserver.ports import IndexEntry, ModelView
from forebay.modelserver.process.segments import Staging
from forebay.net.server import HttpServer
from forebay.wire.oip.ports import MemoryKind, Region

Run = Callable[[InferRequest], list[InferResponse | None]]
"""The responses to a request; the last one is final, and may be None."""


def same(request: InferRequest) -> list[InferResponse | None]:
    """Each input is an output: IN becomes OUT, IN1 becomes OUT1."""
    outputs = tuple(tensor.named(tensor.name.replace("IN", "OUT")) for tensor in request.inputs)
    return [InferResponse(request.model, "1", request.id, outputs, parameters=dict(request.parameters))]


def add(request: InferRequest) -> list[InferResponse | None]:
    """OUT is IN0 plus IN1."""
    a, b = (memoryview(tensor.data).cast("B").cast("f").tolist() for tensor in request.inputs)
    data = struct.pack(f"<{len(a)}f", *(x + y for x, y in zip(a, b, strict=True)))
    out = Tensor("OUT", Datatype.FP32, request.inputs[0].shape, memoryview(data))
    return [InferResponse(request.model, "2", request.id, (out,))]


def words(request: InferRequest) -> list[InferResponse | None]:
    """Each word of the text is a response; the end comes by itself."""
    text = bytes(request.inputs[0].data)[4:]
    said: list[InferResponse | None] = []
    for word in text.split():
        data = struct.pack("<I", len(word)) + word
        outputs = (Tensor("text", Datatype.BYTES, (1,), data),)
        error = Refused(Kind.INTERNAL, "lost the thread") if word == b"fail" else None
        said.append(InferResponse(request.model, "1", request.id, () if error else outputs, error=error))
    return [*said, None]


def wrong(request: InferRequest) -> list[InferResponse | None]:
    """An error of the model."""
    return [InferResponse(request.model, "1", "", error=Refused(Kind.UNAVAILABLE, "the model gave up", 7))]


def odd(request: InferRequest) -> list[InferResponse | None]:
    """A response with fewer bytes than its shape says."""
    return [InferResponse(request.model, "1", "", (Tensor("OUT", Datatype.FP32, (4,), b"1234"),))]


def broken(request: InferRequest) -> list[InferResponse | None]:
    """A response that no code of ours should make."""
    return [InferResponse(request.model, "1", "", cast(Any, (None,)))]


def spec(name: str, datatype: Datatype, *dims: int) -> TensorSpec:
    """An input or output."""
    return TensorSpec(name, datatype, dims)


F32, TEXT = Datatype.FP32, Datatype.BYTES
ECHO = ModelConfig("echo", "python", inputs=(spec("IN", F32, -1),), outputs=(spec("OUT", F32, -1),))
STREAM = ModelConfig(
    "words",
    "python",
    max_batch=0,
    inputs=(spec("prompt", TEXT, 1),),
    outputs=(spec("text", TEXT, 1),),
    decoupled=True,
)
MODELS: dict[str, tuple[ModelConfig, Run]] = {
    "echo": (ECHO, same),
    "batches": (replace(ECHO, name="batches", max_batch=8), same),
    "add": (
        ModelConfig(
            "add",
            "onnxruntime",
            "onnxruntime_onnx",
            8,
            inputs=(spec("IN0", F32, 4), spec("IN1", F32, 4)),
            outputs=(spec("OUT", F32, 4),),
        ),
        add,
    ),
    "words": (STREAM, words),
    "one": (replace(STREAM, name="one", decoupled=False), words),
    "wrong": (replace(ECHO, name="wrong"), wrong),
    "odd": (replace(ECHO, name="odd"), odd),
    "twice": (replace(ECHO, name="twice"), lambda request: same(request) * 2),
    "split": (replace(ECHO, name="split"), lambda request: [*same(request), None]),
    "silent": (replace(ECHO, name="silent"), lambda _: [None]),
    "slow": (replace(ECHO, name="slow"), lambda _: []),
    "buggy": (replace(ECHO, name="buggy"), broken),
    "stumbles": (replace(ECHO, name="stumbles"), lambda request: [*same(request), *broken(request)]),
}


class FakeTicket:
    """A ticket that remembers its cancellation."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeModels:
    """The models of `MODELS`, in memory."""

    def __init__(self) -> None:
        self.ready = True
        self.waiting: OnResponse | None = None
        """Callback of the request to a model that does not answer."""
        self.requests: list[InferRequest] = []
        self.dropped_ids: list[str] = []
        self.abreast = 1
        self.tickets: list[FakeTicket] = []
        self.loads: list[tuple[str, Mapping[str, str | bytes | int | bool]]] = []
        self.unloads: list[tuple[str, bool, str]] = []

    def view(self, name: str, version: str) -> ModelView:
        if name not in MODELS:
            raise Refused(Kind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if version not in ("", "1", "2"):
            raise Refused(Kind.NOT_FOUND, f"Request for unknown model: '{name}' version {version} is not found")
        config = MODELS[name][0]
        return ModelView(
            config, {"name": name, "max_batch_size": config.max_batch}, version or "2", ("1", "2"), self.abreast
        )

    def labels(self, name: str, version: str, output: str) -> Sequence[str]:
        return ("cat", "dog") if name == "batches" else ()

    def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        self.view(name or "echo", version)
        done = ModelStatistics("echo", "1", 5, 3, 2, success=Duration(2, 10))
        done.batches[2] = BatchStatistics(2, compute_infer=Duration(1, 7))
        done.batches[1] = BatchStatistics(1, compute_infer=Duration(1, 3))
        done.responses["0"] = ResponseStatistics(success=Duration(1, 4))
        return [done] if name != "" else [done, ModelStatistics("words", "1")]

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        ready = [IndexEntry("echo", "1", "READY")]
        return ready if ready_only else [*ready, IndexEntry("bad", "2", "UNAVAILABLE", "no file"), IndexEntry("new")]

    async def refresh(self) -> None:
        """Nothing to scan."""

    async def load(self, name: str, parameters: Mapping[str, str | bytes | int | bool]) -> None:
        await asyncio.sleep(0)
        if name == "bad":
            raise Refused(Kind.INTERNAL, "failed to load 'bad', no version is available")
        if name == "worse":
            raise ZeroDivisionError
        self.loads.append((name, parameters))

    async def unload(self, name: str, dependents: bool, version: str = "") -> None:
        await asyncio.sleep(0)
        self.unloads.append((name, dependents, version))

    def infer(self, request: InferRequest, on_response: OnResponse) -> Ticket:
        self.requests.append(request)
        responses = MODELS[request.model][1](request)
        self.waiting = on_response if not responses else None
        loop = asyncio.get_running_loop()
        for n, response in enumerate(responses, 1):
            loop.call_soon(on_response, response, n == len(responses))
        self.tickets.append(FakeTicket())
        return self.tickets[-1]

    def dropped(self, request: InferRequest) -> None:
        self.dropped_ids.append(request.id)


class FakeTarget:
    """Part of a region, where an output goes."""

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def put(self, output: str, data: Any) -> None:
        if len(data) > len(self.view):
            text = f"output '{output}' has {len(self.view)} bytes, needs {len(data)}"
            raise Refused(Kind.INVALID_ARGUMENT, text)
        self.view[: len(data)] = data


class FakeRegions:
    """Shared memory regions in the memory of this process."""

    def __init__(self) -> None:
        self.known: dict[str, Region] = {}
        self.memory: dict[str, bytearray] = {}

    def target(self, name: str, offset: int, size: int) -> "FakeTarget":
        return FakeTarget(self.read(name, offset, size))

    def read(self, name: str, offset: int, size: int) -> memoryview:
        if name not in self.known:
            raise Refused(Kind.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
        if offset + size > self.known[name].size:
            raise Refused(Kind.INVALID_ARGUMENT, f"Invalid offset + byte size for shared memory region: '{name}'")
        return memoryview(self.memory[name])[offset : offset + size]

    def register(self, region: Region) -> None:
        if region.kind is MemoryKind.CUDA:
            raise Refused(Kind.UNSUPPORTED, "no CUDA here")
        self.known[region.name] = region
        self.memory[region.name] = bytearray(region.size)

    def unregister(self, kind: MemoryKind, name: str) -> None:
        for each in [name] if name else list(self.known):
            self.known.pop(each, None)

    def status(self, kind: MemoryKind, name: str) -> Sequence[Region]:
        return [each for each in self.known.values() if each.kind is kind and name in ("", each.name)]


class FakeSettings:
    """Trace and log settings in memory."""

    def __init__(self) -> None:
        self.traces: dict[str, dict[str, Any]] = {"": {"trace_level": ["OFF"]}}
        self.logs: dict[str, Any] = {"log_info": True}

    def trace(self, model: str) -> Mapping[str, Any]:
        return self.traces.get(model, self.traces[""])

    def change_trace(self, model: str, changes: Mapping[str, Any]) -> None:
        if "trace_file" in changes:
            raise Refused(Kind.UNSUPPORTED, "trace file location can not be updated through network protocol")
        self.traces[model] = {**self.trace(model), **changes}

    def logging(self) -> Mapping[str, Any]:
        return self.logs

    def change_logging(self, changes: Mapping[str, Any]) -> None:
        self.logs |= changes


class Rig:
    """A front, what is behind it, and one connection to it."""

    front: HttpFront

    def __init__(
        self, server: HttpServer, models: FakeModels, space: FakeRegions, switches: FakeSettings, line: Peer
    ) -> None:
        self.server = server
        self.models = models
        self.space = space
        self.switches = switches
        self.line = line

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """One request and its answer; `_` in names of headers stands for `-`."""
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"{method} {path} HTTP/1.1\r\nhost: a\r\n{lines}content-length: {len(body)}\r\n\r\n"
        self.line.send(head.encode(errors="surrogateescape") + body)
        answer = await self.line.answer()
        if b"content-encoding" not in answer.headers:
            kind = answer.headers.get(b"content-type", b"").decode()
            fits(method, path.partition("?")[0], answer.status, kind, answer.body)
        return answer

    async def infer(self, model: str, document: Any, binary: bytes = b"", **headers: str) -> Answer:
        """One inference."""
        text = document if isinstance(document, bytes) else msgspec.json.encode(document)
        if binary:
            headers["Inference_Header_Content_Length"] = str(len(text))
        return await self.ask("POST", f"/v2/models/{model}/infer", text + binary, **headers)


@contextlib.asynccontextmanager
async def rig(**options: Any) -> AsyncIterator[Rig]:
    """A front on a free port."""
    models, space, switches = FakeModels(), FakeRegions(), FakeSettings()
    async with asyncio.TaskGroup() as tasks:
        front = HttpFront(
            models,
            space,
            switches,
            tasks=tasks,
            log=structlog.get_logger(),
            options=FrontOptions(**options),
            staging=Staging(),
        )
        limits = Limits(body_bytes_max=BODY_BYTES_MAX)
        async with serving(front.handle, limits, place=front.place) as server, peer(server.port) as line:
            made = Rig(server, models, space, switches, line)
            made.front = front
            yield made


def json_of(answer: Answer) -> Any:
    """The JSON of an answer."""
    return msgspec.json.decode(answer.body)


def fp32(data: Any = None, shape: Any = (4,), name: str = "IN", **parameters: Any) -> dict[str, Any]:
    """An input."""
    given: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(shape)}
    if data is not None:
        given["data"] = data
    if parameters:
        given["parameters"] = parameters
    return given


def parts(answer: Answer) -> tuple[Any, bytes]:
    """The JSON of an answer and what is behind it."""
    size = int(answer.headers[b"inference-header-content-length"])
    return json_of(Answer(0, {}, answer.body[:size])), answer.body[size:]
