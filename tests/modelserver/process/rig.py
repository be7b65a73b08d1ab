"""Real child processes with the backend of `backend/`, and helpers to run batches on them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from forebay.core.serving.config import Datatype, ModelConfig
from forebay.core.serving.values import Parameter, Tensor
from forebay.modelserver.process.placement import ChildSpec, Placement
from forebay.modelserver.process.process import ModelProcess
from forebay.modelserver.process.values import Answer, Done, GaveUp, Work

BACKEND = Path(__file__).parent / "backend"
PATIENCE_S = 60.0
_PATH = os.pathsep.join(filter(None, (str(BACKEND), os.environ.get("PYTHONPATH"))))
HERE = Placement(environment=(("PYTHONPATH", _PATH),))


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.done: Done | None = None
        self.responses: list[tuple[int, Answer | None, bool]] = []
        self.on_news: Callable[[], None] = lambda: None

    def on_response(self, index: int, answer: Answer | None, final: bool) -> None:
        self.responses.append((index, answer, final))
        self.on_news()

    def on_answers(self, first: int, done: Done) -> None:
        self.responses += [(index, answer, True) for index, answer in enumerate(done.answers, first)]
        self.on_news()

    def on_done(self, done: Done) -> None:
        assert self.done is None
        self.done = done
        self.on_news()


def spec(folder: Path, instances: Sequence[Placement] = (HERE,), **fields: Any) -> ChildSpec:
    """A model of the backend `rig`; `parameters` are the model's."""
    config = ModelConfig(
        "m", "rig", decoupled=fields.pop("decoupled", False), parameters=fields.pop("parameters", {})
    )
    return ChildSpec(fields.pop("backend", "rig"), config, folder, tuple(instances), **fields)


def work(do: str = "echo", data: Any = (1.0, 2.0), id: str = "", **parameters: Parameter) -> Work:
    """A request with one input, x."""
    array = np.asarray(data, np.float32) if not isinstance(data, np.ndarray) else data
    return Work(id, (Tensor("x", Datatype.FP32, array.shape, array.tobytes()),), parameters={"do": do, **parameters})


async def until(condition: Callable[[], object]) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def run(process: ModelProcess, *works: Work, instance: int = 0) -> Done:
    """Execute a batch; what became of it."""
    heard = Heard()
    process.execute(instance, works, heard)
    await until(lambda: heard.done is not None)
    assert heard.done is not None
    return heard.done


async def answers(process: ModelProcess, *works: Work, instance: int = 0) -> list[Answer]:
    """Execute a batch that succeeds."""
    done = await run(process, *works, instance=instance)
    assert done.failure is None, done.failure
    return [answer for answer in done.answers if answer is not None]


def values(answer: Answer, name: str = "x") -> list[float]:
    """A float output of a response."""
    tensor = next(tensor for tensor in answer.outputs if tensor.name == name)
    return np.frombuffer(tensor.data, np.float32).tolist()


@asynccontextmanager
async def started(
    spec: ChildSpec, *, hang_s: float = 30.0, load_timeout_s: float = 60.0, ready: bool = True, **options: Any
) -> AsyncIterator[ModelProcess]:
    """A process that runs, and is gone afterwards without a trace."""
    process = ModelProcess(spec, hang_s=hang_s, load_timeout_s=load_timeout_s, log=structlog.get_logger(), **options)
    failure: list[GaveUp] = []

    async def owned() -> None:
        try:
            await process.run()
        except GaveUp as gave_up:
            failure.append(gave_up)

    pids: list[int] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(owned())
        try:
            if ready:
                await process.wait_ready()
            yield process
        finally:
            pids = list(process.pids)
            process.stop()
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def fds() -> Mapping[str, str]:
    """What this process has open: sockets, pipes, memory files."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("socket:", "pipe:", "/memfd:", "anon_inode:[pidfd]")):
            found[name] = target
    return found
