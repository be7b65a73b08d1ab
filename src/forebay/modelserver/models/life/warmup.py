"""Requests that every instance of a model must have answered before the model is ready."""

import asyncio
import secrets
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Final

from forebay.core.serving.config import ELEMENT_BYTES, Datatype, ModelConfig, Warmup, WarmupInput
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Tensor
from forebay.modelserver.process.process import ModelProcess
from forebay.modelserver.process.values import Answer, Done, Work

FOLDER: Final = "warmup"
"""In the model's folder: files with the bytes of inputs."""
BYTES_MAX: Final = 2**30
"""Of all inputs of one warm-up request."""


class _Heard:
    """Collects what a warm-up batch says."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.errors: list[str] = []
        self._streams = 0
        self._finals = 0
        self._done = False

    def on_response(self, index: int, answer: Answer | None, final: bool) -> None:
        """A response of a decoupled model."""
        self._note(answer)
        self._finals += final
        self._check()

    def on_done(self, done: Done) -> None:
        """The batch is over."""
        if done.failure is not None:
            self.errors.append(done.failure.text)
        for answer in done.answers:
            self._note(answer)
        self._streams = sum(answer is None for answer in done.answers)
        self._done = True
        self._check()

    def _note(self, answer: Answer | None) -> None:
        if answer is not None and answer.error is not None:
            self.errors.append(answer.error.text)

    def _check(self) -> None:
        if self._done and (self._finals >= self._streams or self.errors):
            self.ended.set()


async def warm_up(config: ModelConfig, folder: Path, process: ModelProcess) -> None:
    """Run all warm-ups of a model on each of its instances. Raises `Refused` with what went wrong."""
    for warmup in config.warmups:
        works = list(works_of(config, warmup, folder))
        for _ in range(max(1, warmup.count)) if works else ():
            for instance in range(process.instances):
                heard = _Heard()
                process.execute(instance, works, heard)
                await heard.ended.wait()
                if heard.errors:
                    text = f"failed to run warmup sample '{warmup.name}': {'; '.join(heard.errors)}; "
                    raise Refused(Kind.INVALID_ARGUMENT, text)


def works_of(config: ModelConfig, warmup: Warmup, folder: Path) -> Iterator[Work]:
    """The requests of one warm-up: as many as its batch size says, with one row each. Raises `Refused`."""
    inputs = [_tensor(config, name, given, folder) for name, given in warmup.inputs.items()]
    if sum(len(tensor.data) for tensor in inputs) > BYTES_MAX:
        raise Refused(Kind.INVALID_ARGUMENT, f"warmup sample '{warmup.name}' has more than {BYTES_MAX} bytes")
    for number in range(warmup.batch_size):
        yield Work(f"warmup-{number}", inputs, start=True, end=True)


def _tensor(config: ModelConfig, name: str, given: WarmupInput, folder: Path) -> Tensor:
    batched = config.max_batch > 0 and config.input(name) is not None
    shape = (1, *given.dims) if batched else given.dims
    return Tensor(name, given.datatype, shape, _content(name, given, folder))


def _content(name: str, given: WarmupInput, folder: Path) -> bytes:
    elements = prod(given.dims)
    width = ELEMENT_BYTES.get(given.datatype, 4)  # a BYTES element of no bytes is its length alone
    if elements < 0 or elements * width > BYTES_MAX:
        raise Refused(
            Kind.INVALID_ARGUMENT,
            f"warmup setting expects all variable-size dimensions are specified for input '{name}'",
        )
    if given.fill == "file":
        data = _file(folder / FOLDER / given.file)
        if given.datatype is Datatype.BYTES:
            return data
        if len(data) < elements * width:
            text = (
                f"warmup setting expects {elements * width} bytes, but the data provided from {given.file} only has "
                f"{len(data)} bytes"
            )
            raise Refused(Kind.INVALID_ARGUMENT, text)
        return data[: elements * width]
    if given.fill == "random" and given.datatype not in (Datatype.BYTES, Datatype.BOOL):
        return secrets.token_bytes(elements * width)
    return bytes(elements * width)


def _file(path: Path) -> bytes:
    try:
        if path.stat().st_size > BYTES_MAX:
            raise Refused(Kind.INVALID_ARGUMENT, f"warmup data '{path.name}' has more than {BYTES_MAX} bytes")
        return path.read_bytes()
    except OSError as error:
        text = f"warmup data '{path.name}' cannot be read: {error.strerror}"
        raise Refused(Kind.INVALID_ARGUMENT, text) from None
