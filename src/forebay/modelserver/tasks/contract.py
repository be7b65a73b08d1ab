"""What a task is: an endpoint, and the tensor names that its models share.

A model opts in with `parameters { key: "forebay.task" value { string_value: "rerank" } }` in its configuration. It
stays an ordinary model that also answers the inference protocol, and requests of both kinds share batches.
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
    """A complete response."""

    body: bytes
    content_type: bytes = JSON
    tokens: int = 0
    """Tokens that the model has read; 0 if it does not count them."""


class ContractViolation(Exception):  # noqa: N818 - states the condition
    """A model's output violates its task's contract; the text says how, and may be shown to clients."""


@dataclass(frozen=True, slots=True)
class Results:
    """The models' responses to a job. All data is `bytes`, and may be kept."""

    model: str
    config: ModelConfig
    responses: Sequence[InferResponse]
    """In row order; several responses of a decoupled model in order of arrival."""
    labels: Callable[[str], Sequence[str]]
    """Class labels of an output, by its name; empty: no labels."""

    def tensors(self, name: str) -> list[Tensor]:
        """An output, once per response that has it."""
        return [tensor for response in self.responses for tensor in response.outputs if tensor.name == name]


@dataclass(frozen=True, slots=True)
class Stream:
    """Turns responses of a decoupled model into chunks of a streamed response."""

    content_type: bytes
    piece: Callable[[InferResponse], bytes]
    """The chunk for a response, whose buffers are valid until this returns. Empty: nothing to send."""
    last: Callable[[], bytes] = bytes
    """The last chunk."""
    failed: Callable[[Refusal], bytes] | None = None
    """The chunk that reports an error after the start; None: the connection is aborted."""


def copied(response: InferResponse) -> InferResponse:
    """The response with its own buffers: the original ones are valid only during the callback."""
    return response.copied()


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed request of `rows` items, several of which may go in one inference."""

    model: str
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    """Input tensors of the rows `low` to `high`, exclusive; the first dimension of each shape is `high - low`."""
    answer: Callable[[Results], Answer]
    """Builds the response. May raise `Refusal`."""
    rows: int = 1
    param: str = "input"
    """The request field to report if the model rejects its input."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    keep: Callable[[InferResponse], InferResponse] = copied
    """Reduces each response to what is kept. Called as they arrive, to spread expensive work."""
    stream: Stream | None = None
    """If set, the response is streamed and `answer` is not called. Requires a single row."""


@dataclass(frozen=True, slots=True)
class Task:
    """An endpoint of a task. `read` parses a body and its content type into a job. Raises `Refusal`."""

    name: str
    read: Callable[[bytes, bytes], Job]
    outputs: tuple[str, ...]
    """Outputs that models must have."""
    extras: tuple[str, ...] = ()
    """Outputs that are requested if the model has them."""
    shape: Shape = field(default_factory=dict)
    """JSON Schema of the request body (of a form without its file), checked against the published API description."""
    forms: bool = False
    """Whether bodies may be forms. Otherwise they are read as JSON, whatever their content type is."""
