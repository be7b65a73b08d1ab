"""Warm-up: requests that every instance must have answered before the model is ready."""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Final

from forebay.core.serving.config import ELEMENT_BYTES, Datatype, ModelConfig, Warmup, WarmupInput
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, Tensor
from forebay.modelserver.models.running.inputs import LENGTH, Contract, prefix
from forebay.modelserver.process.values import Answer, Done, Execute, Work

FOLDER: Final = "warmup"
"""Subfolder of the model's folder with input data files."""
BYTES_MAX: Final = 2**30
"""Size limit of all inputs of one warm-up request."""


class _Results:
    """Collects the responses to one warm-up batch."""

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

    def on_answers(self, first: int, done: Done) -> None:
        """A part of the batch has finished."""
        for answer in done.answers:
            self._note(answer)
        self._finals += len(done.answers)

    def on_done(self, done: Done) -> None:
        """The batch has finished."""
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


async def warm_up(config: ModelConfig, folder: Path, strings_max: int, instances: Sequence[Execute]) -> None:
    """Run all warm-up samples on each of these instances. Raises `Refused` with the errors."""
    contract = Contract(config, strings_max)
    for warmup in config.warmups:
        works = list(works_of(config, warmup, folder, contract))
        for _ in range(max(1, warmup.count)) if works else ():
            for execute in instances:
                results = _Results()
                execute(works, results)
                await results.ended.wait()
                if results.errors:
                    text = f"failed to run warmup sample '{warmup.name}': {'; '.join(results.errors)}; "
                    raise Refused(Kind.INVALID_ARGUMENT, text)


def works_of(config: ModelConfig, warmup: Warmup, folder: Path, contract: Contract) -> Iterator[Work]:
    """The requests of one warm-up sample: `batch_size` requests of one row each. Raises `Refused`."""
    if not warmup.batch_size:
        return  # no requests, as in Triton; the sample is not even validated
    sample = f"warmup sample '{warmup.name}'"
    most = max(1, config.max_batch)
    if warmup.batch_size > most:
        text = f"{sample}: batch size {warmup.batch_size} for '{config.name}', max allowed is {most}"
        raise Refused(Kind.INVALID_ARGUMENT, text)
    given = [_tensor(config, name, each, folder, sample) for name, each in warmup.inputs.items()]
    if sum(len(tensor.data) for tensor in given) > BYTES_MAX:
        raise Refused(Kind.INVALID_ARGUMENT, f"{sample} has more than {BYTES_MAX} bytes")
    # Clients cannot send inputs that the scheduler makes, so the contract does not know them.
    made = _made(config)
    own = tuple(tensor for tensor in given if tensor.name not in made)
    try:
        checked = contract.check(InferRequest(config.name, "", "", own))
    except Refused as refused:
        raise Refused(refused.kind, f"{sample}: {refused.text.removeprefix(prefix(''))}") from None
    inputs = (*checked.inputs, *(tensor for tensor in given if tensor.name in made))
    for number in range(warmup.batch_size):
        yield Work(f"warmup-{number}", inputs, start=True, end=True)


def _made(config: ModelConfig) -> set[str]:
    """Inputs that the scheduler makes, unless a warm-up sample gives them."""
    names = {name for batch_input in config.batch_inputs for name in batch_input.targets}
    if config.sequences is not None:
        names.update(control.tensor for control in config.sequences.controls)
        names.update(state.input for state in config.sequences.states)
    return names.difference(spec.name for spec in config.inputs)


def _tensor(config: ModelConfig, name: str, given: WarmupInput, folder: Path, sample: str) -> Tensor:
    # what describes the whole batch has no batch dimension
    whole = name in _made(config) and any(name in each.targets for each in config.batch_inputs)
    shape = (1, *given.dims) if config.max_batch > 0 and not whole else given.dims
    # an empty string is encoded as its length prefix
    size_bytes = prod(given.dims) * ELEMENT_BYTES.get(given.datatype, LENGTH.size)
    if size_bytes > BYTES_MAX:
        text = f"{sample}: input '{name}' has {size_bytes} bytes; at most {BYTES_MAX}"
        raise Refused(Kind.INVALID_ARGUMENT, text)
    return Tensor(name, given.datatype, shape, _content(given, size_bytes, folder))


def _content(given: WarmupInput, size_bytes: int, folder: Path) -> bytes:
    if given.fill == "file":
        data = _file(folder / FOLDER / given.file)
        if given.datatype is Datatype.BYTES:
            return data
        if len(data) < size_bytes:
            text = (
                f"warmup setting expects {size_bytes} bytes, but the data provided from {given.file} only has "
                f"{len(data)} bytes"
            )
            raise Refused(Kind.INVALID_ARGUMENT, text)
        return data[:size_bytes]
    if given.fill == "random" and given.datatype not in (Datatype.BYTES, Datatype.BOOL):
        return secrets.token_bytes(size_bytes)
    return bytes(size_bytes)


def _file(path: Path) -> bytes:
    try:
        if path.stat().st_size > BYTES_MAX:
            raise Refused(Kind.INVALID_ARGUMENT, f"warmup data '{path.name}' has more than {BYTES_MAX} bytes")
        return path.read_bytes()
    except OSError as error:
        text = f"warmup data '{path.name}' cannot be read: {error.strerror}"
        raise Refused(Kind.INVALID_ARGUMENT, text) from None
