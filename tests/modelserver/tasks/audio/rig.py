"""The audio endpoints over in-memory models."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import structlog
from tests.modelserver.openapi_check import answered
from tests.net.rig import serving

from forebay.core.model import Limits
from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse, Tensor
from forebay.core.task_tensors import PARAMETER
from forebay.modelserver.ports import IndexEntry, ModelView
from forebay.modelserver.tasks.endpoint import TaskFront
from forebay.modelserver.tasks.table import TASKS
from forebay.modelserver.tasks.tensors import strings

Run = Callable[[InferRequest], list[InferResponse | None]]
"""The responses to a request; the last one is final, and may be None."""


class Ticket:
    """A request under way."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeAudioModels:
    """One model with a task, which answers with `run`."""

    ready = True

    def __init__(self, task: str, outputs: Sequence[str], run: Run) -> None:
        specs = tuple(TensorSpec(name, Datatype.BYTES, (-1,)) for name in outputs)
        self.config = ModelConfig("m", "python", outputs=specs, decoupled=True, parameters={PARAMETER: task})
        self.run = run
        self.requests: list[InferRequest] = []
        self.tickets: list[Ticket] = []

    def view(self, name: str, version: str) -> ModelView:
        if name != "m":
            raise Refused(Kind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return ModelView(self.config, {}, "1", ["1"])

    def labels(self, name: str, version: str, output: str) -> Sequence[str]:
        return ()

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        return [IndexEntry("m", "1", "READY")]

    def infer(self, request: InferRequest, on_response: OnResponse) -> Ticket:
        self.requests.append(request)
        responses = self.run(request)
        for n, response in enumerate(responses, 1):
            asyncio.get_running_loop().call_soon(on_response, response, n == len(responses))
        self.tickets.append(Ticket())
        return self.tickets[-1]


HOOKS = {"response": [answered]}


@contextlib.asynccontextmanager
async def speaking(shelf: FakeAudioModels) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the endpoints."""
    front = TaskFront(shelf, TASKS, structlog.get_logger())  # type: ignore[arg-type]  # it loads nothing
    async with (
        serving(front.handle, Limits(body_bytes_max=1 << 20)) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}/v1/audio", event_hooks=HOOKS) as client,
    ):
        yield client


def response(**outputs: Tensor) -> InferResponse:
    """A response with these outputs."""
    return InferResponse("m", "1", "", tuple(tensor.named(name) for name, tensor in outputs.items()))


def texts(*values: str | bytes) -> Tensor:
    """A BYTES tensor."""
    return strings("", values, (len(values),))


def floats(*values: float, shape: tuple[int, ...] = ()) -> Tensor:
    """A tensor of FP32."""
    return Tensor("", Datatype.FP32, shape or (len(values),), struct.pack(f"<{len(values)}f", *values))
