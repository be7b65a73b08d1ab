"""What the server hands to the processes of a model, and what comes back."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from forebay.core.serving.errors import Refused
from forebay.core.serving.values import Parameter, Tensor
from forebay.engines.tensor.protocol import Act

NOTHING: Final[Mapping[str, Parameter]] = MappingProxyType({})
"""No parameters."""


class Work:
    """One request of a batch. A tensor's data may be a view that another model's `Answer` has: then it is not copied.

    The caller keeps nothing alive: whatever the child still reads is kept until it has read it.
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
    """One response. Large outputs are views into memory shared with the child.

    There is nothing to release: the memory goes back to the child when the last view of it is gone, slices of views
    included. So do not keep views for long (a cache copies: `bytes(tensor.data)`).
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
        """No answer yet: the request is to come again in a later batch (an iterative sequence)."""


class Done(NamedTuple):
    """An instance has finished a batch and is free. Times are CLOCK_MONOTONIC, nanoseconds."""

    answers: tuple[Answer | None, ...]
    """One for each request, in order; None: its responses come to `on_response` (decoupled). Empty with `failure`."""
    compute_start_ns: int
    """When the child began with the batch."""
    compute_input_ns: int
    """How long making arrays of the bytes took."""
    compute_infer_ns: int
    compute_output_ns: int
    failure: Refused | None = None
    """The whole batch has failed: UNAVAILABLE (crashed, hung, replaced: try again) or INTERNAL (the model raised)."""


class Listener(Protocol):
    """Who hears of a batch. Never called before `execute` has returned, always on the server's loop.

    Every request ends exactly once: by its answer in `Done`, by `Done.failure`, or, where that answer is None, by
    an `on_response` with `final`. Those may come before and after `on_done`.
    """

    def on_response(self, index: int, answer: Answer | None, final: bool) -> None:
        """A response to the request of that index in the batch (decoupled); None: nothing but the end."""

    def on_done(self, done: Done) -> None:
        """The instance is free for the next batch. Exactly one per batch."""


class Call(Protocol):
    """A model asks for another one (BLS)."""

    @property
    def model(self) -> str:
        """The name of the model that is called."""

    @property
    def version(self) -> int:
        """-1: the latest."""

    @property
    def act(self) -> Act:
        """What it wants of it."""

    @property
    def work(self) -> Work:
        """The request; views in it live as long as they are referred to, like those of an `Answer`."""

    on_gone: Callable[[], None] | None
    """Set by who answers: called once if nobody waits any more (the caller has cancelled it, or is gone)."""

    def respond(self, answer: Answer | None, final: bool) -> None:
        """Give a response; None: nothing but the end. Ignored once the calling process is gone."""


OnCall = Callable[[Call], None]
"""Hears of calls; must not block."""


class GaveUp(Exception):  # noqa: N818 - states the condition
    """The model cannot be loaded, or not kept running; the text is for the operator, with its last words."""
