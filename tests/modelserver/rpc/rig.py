"""A gRPC frontend on a free port over in-memory models named after what they do."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog
from tests.modelserver.http.rig import FakeModels, FakeSettings
from tests.modelserver.rpc.raw import Raw
from tests.wire.http2.peer import START
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from forebay.modelserver.process.segments import Staging
from forebay.modelserver.regions import SharedRegions
from forebay.modelserver.rpc.front import RpcFront, RpcOptions

FOUR = struct.pack("<4f", 1, 2, 3, 4)


class Rig:
    """A front, what is behind it, and a stub."""

    def __init__(self, front: RpcFront, models: FakeModels, regions: SharedRegions, channel: Any) -> None:
        self.front = front
        self.models = models
        self.regions = regions
        self.channel = channel
        self.raws: list[Raw] = []
        self.stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    async def raw(self, start: bytes = START) -> Raw:
        """A client that can misbehave."""
        self.raws.append(Raw(*await asyncio.open_connection("127.0.0.1", self.front.port), start))
        return self.raws[-1]

    async def code(self, method: str, message: Any) -> tuple[str, str]:
        """How a call that is refused is refused."""
        try:
            await getattr(self.stub, method)(message)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""

    async def stream(self, messages: Sequence[Any]) -> list[Any]:
        """All answers on a stream of its own."""

        async def sent() -> AsyncIterator[Any]:
            for message in messages:
                yield message

        return [answer async for answer in self.stub.ModelStreamInfer(sent())]


@contextlib.asynccontextmanager
async def rig(folder: Path, **options: Any) -> AsyncIterator[Rig]:
    """A front on a free port; its shared memory is in a folder."""
    models, regions = FakeModels(), SharedRegions(str(folder), Staging())
    log = structlog.get_logger()
    async with asyncio.TaskGroup() as tasks:
        front = RpcFront(models, regions, FakeSettings(), tasks=tasks, log=log, options=RpcOptions(**options))
        await front.start("127.0.0.1", 0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
                it = Rig(front, models, regions, channel)
                try:
                    yield it
                finally:
                    for client in it.raws:
                        client.close()
        finally:
            await front.stop(0)


def infer_request(model: str, raw: bytes | None = FOUR, shape: Sequence[int] = (4,), **more: Any) -> Any:
    """A request with one input IN of floats."""
    parameters = more.pop("parameters", {})
    message = pb.ModelInferRequest(model_name=model, **more)
    message.inputs.add(name="IN", datatype="FP32", shape=shape)
    if raw is not None:
        message.raw_input_contents.append(raw)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def text_request(model: str, text: str, **more: Any) -> Any:
    """A request to a model whose input is a text."""
    message = infer_request(model, None, **more)
    del message.inputs[:]
    message.inputs.add(name="prompt", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(struct.pack("<I", len(text)) + text.encode())
    return message


def floats(data: bytes) -> tuple[float, ...]:
    """The numbers of a raw output."""
    return struct.unpack(f"<{len(data) // 4}f", data)


async def until(condition: Any) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
