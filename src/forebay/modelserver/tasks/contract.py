"""What a task is: an endpoint, and the names of the tensors that it and its models mean the same by.

A model takes part with `parameters { key: "forebay.task" value { string_value: "rerank" } }` in its configuration.
It is a model like any other: it answers the protocol too, and its requests of both kinds share batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from forebay.core.errors import Refusal
from forebay.core.serving.config import ModelConfig
from forebay.core.serving.values import InferResponse, Parameter, Tensor
from forebay.wire.openai_fields import Shape

JSON: Final = b"application/json"


class Answer(NamedTuple):
    """A whole answer."""

    body: bytes
    content_type: bytes = JSON
    tokens: int = 0
    """That the model has read; 0 if it does not count them."""


class Mistake(Exception):  # noqa: N818 - states the condition
    """A model has not given what its task promises; the text says what it did, and may be shown."""


@dataclass(frozen=True, slots=True)
class Results:
    """What the models have said to a job. All data is `bytes`, and may be kept."""

    model: str
    config: ModelConfig
    responses: Sequence[InferResponse]
    """In the order of the rows that they answer; several of a decoupled model in the order they came."""
    labels: Callable[[str], Sequence[str]]
    """What the classes of an output are called, by the output's name; empty: they have no names."""

    def tensors(self, name: str) -> list[Tensor]:
        """An output, once for each response that has it."""
        return [tensor for response in self.responses for tensor in response.outputs if tensor.name == name]


@dataclass(frozen=True, slots=True)
class Stream:
    """How the responses of a decoupled model become the pieces of an answer, one by one."""

    content_type: bytes
    piece: Callable[[InferResponse], bytes]
    """Of each response; its buffers are good until this returns. Empty: nothing to send."""
    last: Callable[[], bytes] = bytes
    """What the stream ends with."""
    failed: Callable[[Refusal], bytes] | None = None
    """What says that something went wrong in the middle; None: the connection is cut."""


def copied(response: InferResponse) -> InferResponse:
    """The response with buffers of its own: those that it comes with are good only while it is being told."""
    return response.copied()


@dataclass(frozen=True, slots=True)
class Job:
    """A request as its task has read it: `rows` things to be done, of which several may go in one inference."""

    model: str
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    """The tensors of the rows from `low` to before `high`; the first dimension of each shape is `high - low`."""
    answer: Callable[[Results], Answer]
    """Puts the answer together. May raise `Refusal`."""
    rows: int = 1
    param: str = "input"
    """The field that is to blame for what the model finds wrong with its input."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    keep: Callable[[InferResponse], InferResponse] = copied
    """What is kept of each response. Asked as they come, so that what takes long need not all be done at the end."""
    stream: Stream | None = None
    """Set: the answer goes out as it is made, and `answer` is not asked. Needs one row."""


@dataclass(frozen=True, slots=True)
class Task:
    """An endpoint of a task. `read` makes a job of a body and its content type. Raises `Refusal`."""

    name: str
    read: Callable[[bytes, bytes], Job]
    outputs: tuple[str, ...]
    """What models must give."""
    extras: tuple[str, ...] = ()
    """What is asked for if the model has it."""
    shape: Shape = field(default_factory=dict)
    """The JSON Schema of its bodies (of a form without the file): the published description is held against it."""
