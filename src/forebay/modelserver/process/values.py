"""What the server passes to the processes of a model, and what they return."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from forebay.core.serving.errors import Refused
from forebay.core.serving.values import Parameter, Tensor
from forebay.engines.tensor.protocol import Act

NOTHING: Final[Mapping[str, Parameter]] = MappingProxyType({})
"""No parameters."""


class Work:
    """One request of a batch. Data that is a view of another model's `Answer` is passed without a copy.

    The caller need not keep anything alive: data is kept until the child has read it.
    """

    __slots__ = (
        "correlation_id", "end", "id", "inputs", "parameters", "priority", "start", "timeout_us", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        inputs: Sequence[Tensor],
        wanted: tuple[str, ...] = (),
        parameters: Mapping[str, Parameter] = NOTHING,
        *,
        correlation_id: int | str = 0,
        start: bool = False,
        end: bool = False,
        timeout_us: int = 0,
        priority: int = 0,
    ) -> None:
        self.id = id
        self.inputs = inputs
        self.wanted = wanted
        self.parameters = parameters
        self.correlation_id = correlation_id
        self.start = start
        self.end = end
        self.timeout_us = timeout_us
        self.priority = priority


class Answer:
    """One response. Large outputs are views of memory shared with the child.

    The memory is released to the child when the last view of it, slices included, is gone. So do not keep views for
    long (a cache copies: `bytes(tensor.data)`).
    """

    __slots__ = ("error", "outputs", "parameters", "reschedule")

    def __init__(
        self,
        outputs: tuple[Tensor, ...] = (),
        parameters: Mapping[str, Parameter] = NOTHING,
        error: Refused | None = None,
        *,
        reschedule: bool = False,
    ) -> None:
        self.outputs = outputs
        self.parameters = parameters
        self.error = error
        self.reschedule = reschedule
        """Not a response: an iterative model wants to see the request again in a later batch."""


class Done(NamedTuple):
    """A batch, or the first part of it, has finished. Times are CLOCK_MONOTONIC, in nanoseconds."""

    answers: tuple[Answer | None, ...]
    """One per request, in order; None: responses come through `on_response` (decoupled), or one came through
    `on_answers`. Empty with `failure`.
    """
    compute_start_ns: int
    """When the child began with the batch."""
    compute_input_ns: int
    """Time to build input arrays."""
    compute_infer_ns: int
    compute_output_ns: int
    failure: Refused | None = None
    """What is not answered failed: UNAVAILABLE (crashed, hung, replaced: retry) or INTERNAL (the model raised)."""


class Listener(Protocol):
    """Receives the results of a batch, on the server's loop, never before `execute` has returned.

    Every request ends exactly once: by an answer in `on_answers` or `on_done`, else by `Done.failure`, or, where its
    answer is None, by an `on_response` with `final`, before or after `on_done`.
    """

    def on_answers(self, first: int, done: Done) -> None:
        """Answers to the requests from index `first` on, whose rows are done; the batch goes on."""

    def on_response(self, index: int, answer: Answer | None, final: bool) -> None:
        """A response to the request with that index (decoupled); None: only the end."""

    def on_done(self, done: Done) -> None:
        """The instance is free for the next batch. Called exactly once per batch."""


Execute = Callable[[Sequence[Work], Listener], object]
"""Sends a batch to an instance. Raises `Refused` if it is not usable."""

WarmUp = Callable[[Sequence[Execute]], Awaitable[None]]
"""Runs warm-up requests on instances. Raises `Refused` if one fails."""


class Call(Protocol):
    """A call from one model to another (BLS)."""

    @property
    def model(self) -> str:
        """Name of the model that is called."""

    @property
    def version(self) -> int:
        """Version that is called; -1: the latest."""

    @property
    def act(self) -> Act:
        """The kind of call."""

    @property
    def work(self) -> Work:
        """The request; like those of an `Answer`, its views stay valid while referenced."""

    on_gone: Callable[[], None] | None
    """Set by the callee's side: called once if the caller has cancelled the call or is gone."""

    def respond(self, answer: Answer | None, final: bool) -> None:
        """Send a response; None: only the end. Ignored once the calling process is gone."""


OnCall = Callable[[Call], None]
"""Receives calls; must not block."""


class GaveUp(Exception):  # noqa: N818 - states the condition
    """The model cannot be loaded or kept running; the text, with its last output, is for the operator."""
