"""Interface of backends to the model server: arrays in, arrays out. Backends live in a child process.

A backend holds one version of one model. If `Loaded.threads` says so, `execute` may be called by several threads at
once, one per instance; all share the weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, overload, runtime_checkable

import msgspec
import numpy as np

from forebay.core.serving.config import ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind

Array = np.ndarray[Any, Any]
"""Little-endian, C-contiguous; BYTES tensors are arrays of `object` with `bytes` elements, BF16 ones are `uint16`."""

Parameter = bool | int | float | str


class Request(msgspec.Struct):
    """One request; inputs include the batch dimension if the model batches."""

    id: str
    inputs: dict[str, Array]
    wanted: tuple[str, ...]
    """Requested outputs; empty: all."""
    parameters: Mapping[str, Parameter] = {}
    correlation_id: int | str = 0
    start: bool = False
    end: bool = False
    timeout_us: int = 0
    priority: int = 0
    cancelled: Callable[[], bool] = lambda: False
    bf16: frozenset[str] = frozenset()
    """In calls of other models, whose configuration the caller does not have: which inputs are BF16."""


class Stack(Sequence[Request]):
    """The requests of a batch whose inputs differ only in their number of rows, as one array per input.

    `sizes` is the number of rows of each request, in order, and `wanted` its requested outputs. `make` creates the
    requests themselves, with views of their rows, from index and inputs on each access.
    """

    __slots__ = ("_make", "inputs", "sizes", "wanted")

    def __init__(
        self,
        inputs: dict[str, Array],
        sizes: Sequence[int],
        wanted: Sequence[tuple[str, ...]],
        make: Callable[[int, dict[str, Array]], Request],
    ) -> None:
        self.inputs = inputs
        self.sizes = sizes
        self.wanted = wanted
        self._make = make

    def part(self, first: int, last: int) -> "Stack":
        """The requests from index `first` to before `last`."""
        start = sum(self.sizes[:first])
        end = start + sum(self.sizes[first:last])
        inputs = {name: array[start:end] for name, array in self.inputs.items()}

        def make(index: int, inputs: dict[str, Array]) -> Request:
            return self._make(first + index, inputs)

        return Stack(inputs, self.sizes[first:last], self.wanted[first:last], make)

    def of(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> "Stack":
        """The same requests with other inputs and requested outputs."""

        def make(index: int, inputs: dict[str, Array]) -> Request:
            return msgspec.structs.replace(self._make(index, inputs), wanted=wanted)

        return Stack(inputs, self.sizes, [wanted] * len(self.sizes), make)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Request]:
        """The requests in order."""
        start = 0
        for place, size in enumerate(self.sizes):
            end = start + size
            yield self._make(place, {name: array[start:end] for name, array in self.inputs.items()})
            start = end

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return list(self)[index]


class BadInput(ValueError):  # noqa: N818 - states the condition
    """A request's input is invalid for this model: the client's error, not the model's."""


def failed(error: Exception) -> "Response":
    """The error response for an exception raised while running a request."""
    kind = Kind.INVALID_ARGUMENT if isinstance(error, BadInput) else Kind.INTERNAL
    return Response(error=str(error) or type(error).__name__, kind=kind)


class Response(msgspec.Struct):
    """Outputs in the model's order, or `error` (safe to show to clients)."""

    outputs: dict[str, Array] = {}
    error: str = ""
    kind: Kind = Kind.INTERNAL
    """Kind of `error`."""
    parameters: Mapping[str, Parameter] = {}
    reschedule: bool = False
    """Not a response: the request of an iterative sequence should come again in a later batch."""
    bf16: frozenset[str] = frozenset()
    """In the response to a call of another model: which outputs are BF16."""


class Rows(Sequence[Response]):
    """The responses to a batch whose requests want the same outputs, as one array per output.

    `sizes` is the number of rows of each request, in order; together they cover every array.
    """

    __slots__ = ("outputs", "sizes")

    def __init__(self, outputs: Mapping[str, Array], sizes: Sequence[int]) -> None:
        self.outputs = outputs
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Response]:
        """The response to each request, as views of its rows."""
        start = 0
        for size in self.sizes:
            yield Response({name: array[start : start + size] for name, array in self.outputs.items()})
            start += size

    @overload
    def __getitem__(self, index: int) -> Response: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Response]: ...
    def __getitem__(self, index: int | slice) -> Response | Sequence[Response]:
        return list(self)[index]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Description of a loaded model. Empty `inputs`/`outputs`: unknown to the backend."""

    inputs: tuple[TensorSpec, ...] = ()
    """With the dimensions in the file, the batch dimension included."""
    outputs: tuple[TensorSpec, ...] = ()
    omitted: tuple[str, ...] = ()
    """Outputs that cannot be served, with the reason, unless the configuration lists those that are served."""
    threads: bool = True
    """Whether several instances may run as threads of this process and share its weights. Otherwise `load`, `execute`
    and `close` are called in the main thread (`close` in another one during a batch that does not end).
    """
    measures: bool = False
    """Whether the backend is `measures.Measuring`."""
    config: ModelConfig | None = None
    """The configuration as completed by the model (a Python model's `auto_complete_config`)."""


class Emit(Protocol):
    """Sends responses while a batch runs, or after it."""

    def __call__(self, index: int, response: Response | Sequence[Response] | None, final: bool) -> None:
        """Send a response of a decoupled model to the request with that index in the batch, or with None only the
        end; `final` ends it.

        Several responses end as many requests, from that index on: the first ones of the batch that have no response
        yet. What `execute` returns leaves them out.
        """


class Act(StrEnum):
    """Kind of a call to another model."""

    INFER = "infer"
    READY = "ready"
    """The response's parameter of this name says whether the model is ready."""
    LOAD = "load"
    """With the request's parameters, and its inputs as files."""
    UNLOAD = "unload"
    """With the request's parameter `unload_dependents`."""


class CallModel(Protocol):
    """Calls another model of the server."""

    def __call__(
        self,
        model: str,
        version: int,
        request: Request,
        on_response: Callable[[Response, bool], None],
        act: Act = Act.INFER,
    ) -> Callable[[], None]:
        """Run `request`; `on_response` is called in another thread, with True as second argument at the end.

        Returns a function that cancels the call, in any thread: it then ends with an error (CANCELLED).
        """


@runtime_checkable
class Informed(Protocol):
    """A backend whose model can read its configuration."""

    def tell(self, document: str) -> None:
        """Pass the configuration that clients see, as JSON, as far as known before loading. Called before `load`."""


class Backend(Protocol):
    """One version of one model, loaded."""

    def load(self, config: ModelConfig, folder: Path, instance: int, call: CallModel) -> Loaded:
        """Load the model in `folder` (that of the version). Raises `BackendFailed`."""

    def execute(self, instance: int, requests: Sequence[Request], emit: Emit) -> Sequence[Response | None]:
        """Run a batch: one response for each request, in order; None where `emit` sends the responses instead, and
        nothing for the first ones that it has ended together.

        An exception fails the whole batch with its text.
        """

    def close(self) -> None:
        """Release everything."""


class BackendFailed(Exception):  # noqa: N818 - states the condition
    """The model cannot be loaded; the text is for the operator."""
