"""What the server hands to the processes of a model, and what comes back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from forebay.core.serving.config import ModelConfig
from forebay.core.serving.errors import Refused
from forebay.core.serving.values import Parameter, Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an instance runs. Instances with equal placements may share a process and the weights in it."""

    cpus: tuple[int, ...] = ()
    """CPUs that it may run on; empty: as the server. Those that the machine lacks are left out."""
    numa_node: int = -1
    """Memory comes from this node where libnuma is installed; -1: from anywhere."""
    nice: int = 0
    """Added to the server's own niceness."""
    environment: tuple[tuple[str, str], ...] = ()
    """Set before any library is imported, such as OMP_NUM_THREADS."""
    gpus: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES: indexes or UUIDs (of GPUs or MIG slices); empty: as the server."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One version of one model, and where its instances run."""

    backend: str
    config: ModelConfig
    folder: Path
    """That of the version."""
    instances: tuple[Placement, ...] = (Placement(),)
    rss_bytes_max: int = 0
    """A process with more memory of its own (resident, not shared, not of files) is replaced after its batch;
    0: any amount."""


class Work(msgspec.Struct, frozen=True):
    """One request of a batch. A tensor's data may be a view that another model's `Answer` has: then it is not copied.

    The caller keeps nothing alive: whatever the child still reads is kept until it has read it.
    """

    id: str
    inputs: Sequence[Tensor]
    wanted: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = {}
    correlation_id: int | str = 0
    start: bool = False
    end: bool = False
    timeout_us: int = 0
    priority: int = 0


class Answer(msgspec.Struct):
    """One response. Large outputs are views into memory shared with the child.

    There is nothing to release: the memory goes back to the child when the last view of it is gone, slices of views
    included. So do not keep views for long (a cache copies: `bytes(tensor.data)`).
    """

    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = {}
    error: Refused | None = None
    reschedule: bool = False
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
    def work(self) -> Work:
        """The request; views in it live as long as they are referred to, like those of an `Answer`."""

    def respond(self, answer: Answer | None, final: bool) -> None:
        """Give a response; None: nothing but the end. Ignored once the calling process is gone."""


OnCall = Callable[[Call], None]
"""Hears of calls; must not block."""


class GaveUp(Exception):  # noqa: N818 - states the condition
    """The model cannot be loaded, or not kept running; the text is for the operator, with its last words."""
