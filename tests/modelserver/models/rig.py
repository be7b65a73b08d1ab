"""A model server with real processes over a repository that a test writes."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Refused
from forebay.core.serving.values import InferRequest, InferResponse, Tensor
from forebay.modelserver.models.options import Control, Options
from forebay.modelserver.models.running.call import Call
from forebay.modelserver.server import ModelServer

PATIENCE_S = 30.0
LOG = structlog.wrap_logger(structlog.testing.CapturingLogger(), processors=[])

TYPES = {"float32": Datatype.FP32, "int32": Datatype.INT32, "int64": Datatype.INT64, "uint64": Datatype.UINT64}
ARRAYS = {datatype: name for name, datatype in TYPES.items()}

PREAMBLE = """
import os, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

def get(request, name="IN"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

def give(array, name="OUT"):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.asarray(array))])

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]
"""
SAME = """
    def answer(self, request):
        return give(get(request))
"""
BATCH_SIZE = """
    def execute(self, requests):
        while Path({gate!r}).exists():
            time.sleep(0.001)
        return [give(np.full_like(get(request), len(requests))) for request in requests]
"""
"""Waits while there is a file, and answers how many requests have shared the batch."""

IO = """
input {{ name: "IN" data_type: TYPE_FP32 dims: [{dims}] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [{dims}] }}
"""


def config(more: str = "", *, dims: str = "-1", max_batch: int = 8, backend: str = "python") -> str:
    """A configuration with one input and one output, which are alike."""
    return f'backend: "{backend}"\nmax_batch_size: {max_batch}\n{IO.format(dims=dims)}{more}'


def write(root: Path, name: str, configuration: str, source: str = SAME, versions: tuple[int, ...] = (1,)) -> Path:
    """Put a Python model into a repository; `{version}` in the source becomes the version."""
    for version in versions:
        folder = root / name / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(PREAMBLE + source.replace("{version}", str(version)))
    (root / name / "config.pbtxt").write_text(configuration)
    return root


def ensemble(
    root: Path,
    name: str,
    steps: list[tuple[str, Mapping[str, str], Mapping[str, str]]],
    configuration: str,
    scheduling: str = "",
) -> None:
    """Put an ensemble into a repository; a step is its model and its two maps."""
    (root / name / "1").mkdir(parents=True)
    text = "".join(
        f'step {{ model_name: "{model}" model_version: -1 '
        + " ".join(f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items())
        + " ".join(f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items())
        + " }\n"
        for model, inputs, outputs in steps
    )
    (root / name / "config.pbtxt").write_text(
        f'platform: "ensemble"\n{configuration}\nensemble_scheduling {{ {scheduling} {text} }}'
    )


def tensor(name: str, values: Any, dtype: str = "float32") -> Tensor:
    """Numbers as they cross."""
    array = np.asarray(values, dtype=dtype)
    return Tensor(name, TYPES[dtype], array.shape, array.tobytes())


def numbers(response: InferResponse, name: str = "OUT") -> list[Any]:
    """What an output has."""
    assert response.error is None, response.error.text
    found = next(each for each in response.outputs if each.name == name)
    values: list[Any] = np.frombuffer(found.data, ARRAYS[found.datatype]).reshape(found.shape).tolist()
    return values


def alive(pid: int) -> bool:
    """Whether a process is there (and not only waits for being reaped)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class PendingRequest:
    """A request and what has come back."""

    def __init__(self) -> None:
        self.responses: list[InferResponse] = []
        self.ended = asyncio.Event()
        self.call: Call | None = None

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """The server's callback."""
        assert not self.ended.is_set()
        if response is not None:
            self.responses.append(response.copied())
        if final:
            self.ended.set()

    async def all(self) -> list[InferResponse]:
        """Every response, once the last one is there."""
        async with asyncio.timeout(PATIENCE_S):
            await self.ended.wait()
        return self.responses

    async def one(self) -> InferResponse:
        """The only response."""
        (response,) = await self.all()
        return response

    async def error(self) -> Refused:
        """What the only response says has gone wrong."""
        refused = (await self.one()).error
        assert refused is not None
        return refused


class Server:
    """A model server, and what tests ask of it. None can be derived from one that is compiled."""

    def __init__(self, options: Options, log: structlog.stdlib.BoundLogger) -> None:
        self.itself = ModelServer(options, log)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.itself, name)

    def ask(self, model: str, *inputs: Tensor, **fields: Any) -> PendingRequest:
        """Send a request. Raises `Refused`."""
        asked = PendingRequest()
        fields = {"version": "", "id": "", **fields}
        asked.call = self.infer(InferRequest(model=model, inputs=inputs, **fields), asked.on_response)
        assert not asked.responses
        return asked

    async def numbers(self, model: str, *inputs: Tensor, **fields: Any) -> list[Any]:
        """The output OUT of a request."""
        return numbers(await self.ask(model, *inputs, **fields).one())

    def states(self, name: str) -> dict[str, tuple[str, str]]:
        """State and reason by version."""
        return {entry.version: (entry.state, entry.reason) for entry in self.index(False) if entry.name == name}

    def pids(self, name: str, version: int = -1) -> list[int]:
        """The processes of a version."""
        return list(self.itself._collection.find(name, version).pids)


@contextlib.asynccontextmanager
async def serving(root: Path, *, log: structlog.stdlib.BoundLogger = LOG, **options: Any) -> AsyncIterator[Server]:
    """A server that loads what it is asked to; at its end no process is left."""
    server = Server(Options(**{"repositories": (root,), "control": Control.EXPLICIT, **options}), log)
    before = children()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run())
        try:
            await server.started()
            yield server
        finally:
            server.stop()
    assert children() == before


def children() -> set[int]:
    """Our own processes."""
    return {
        int(pid)
        for task in os.listdir("/proc/self/task")
        for pid in _read(f"/proc/self/task/{task}/children").split()
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


async def until(what: str, probe: Callable[[], Any]) -> Any:
    """Wait for something that comes about by itself."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := probe()):
            await asyncio.sleep(0.005)
    assert found, what
    return found
