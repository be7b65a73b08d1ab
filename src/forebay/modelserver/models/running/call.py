"""One request in flight in one model version."""

import asyncio
from collections.abc import Callable
from enum import IntEnum
from time import monotonic_ns
from typing import Final, NamedTuple, Protocol

from forebay.core.serving.errors import Refused
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse
from forebay.modelserver.models.running.inputs import Checked


class Phase(IntEnum):
    """Progress of a request."""

    WAITING = 0
    """Waiting for an instance, or for a sleeping model to be loaded."""
    RUNNING = 1
    ENDED = 2


class Runner(Protocol):
    """Runs the requests of one model version."""

    def submit(self, call: "Call") -> None:
        """Queue a request. Raises `Refused` if it cannot; responses come later, never before this returns."""

    def cancel(self, call: "Call") -> None:
        """Cancel a request whose phase has not been changed yet."""


class Scheduler(Runner, Protocol):
    """A runner with a queue and instances."""

    @property
    def waiting(self) -> int:
        """Number of queued requests."""

    def set_instances(self, instances: int) -> None:
        """Update the number of instances."""

    def wake(self) -> None:
        """Check soon whether a batch can start."""

    def close(self, refused: Refused) -> None:
        """Fail all queued requests with this error; no batch runs any more."""


class Watch(Protocol):
    """Traces a request. Ensembles report their steps."""

    def step(self, call: "Call") -> "Watch":
        """A step of an ensemble begins; returns its watch."""

    def on_step_response(self, response: InferResponse | None, final: bool) -> None:
        """A response of the step, or its end."""


class Spent(NamedTuple):
    """Compute times of an execution, in nanoseconds."""

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


NOTHING_SPENT: Final = Spent()


class Call:
    """A request in flight with its response callback and timestamps (CLOCK_MONOTONIC, nanoseconds)."""

    __slots__ = (
        "_on_response",
        "batch",
        "cache_key",
        "cache_ns",
        "checked",
        "index",
        "on_answer",
        "on_end",
        "phase",
        "queued_ns",
        "request",
        "responses",
        "runner",
        "size_bytes",
        "spent",
        "started_ns",
        "watch",
    )

    def __init__(self, request: InferRequest, checked: Checked, on_response: OnResponse) -> None:
        self.request = request
        self.checked = checked
        self._on_response: OnResponse | None = on_response
        self.runner: Runner | None = None
        self.phase = Phase.WAITING
        self.started_ns = self.queued_ns = monotonic_ns()
        self.batch = self.index = -1
        """The number of its batch in the process, and its index in the batch."""
        self.responses = 0
        """Responses delivered so far."""
        self.cache_key = b""
        self.cache_ns = 0
        """Time of a cache lookup that missed."""
        self.spent = NOTHING_SPENT
        """Compute times of its execution; with an ensemble, of all its steps."""
        self.size_bytes = 0
        self.on_answer: Callable[[InferResponse], None] | None = None
        """Called with each response before it is sent."""
        self.on_end: Callable[[Call], None] | None = None
        """Called when the request ends, for whatever reason."""
        self.watch: Watch | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the client has cancelled the request."""
        return self._on_response is None

    def cancel(self) -> None:
        """Cancel the request; no response is delivered after this."""
        if self._on_response is not None and self.phase is not Phase.ENDED:
            self._on_response = None
            if self.runner is not None:
                self.runner.cancel(self)

    def respond(self, response: InferResponse | None, final: bool) -> None:
        """Deliver a response; the final one ends the request."""
        if self.phase is Phase.ENDED:
            return
        if response is not None:
            self.responses += 1
            if self.on_answer is not None:
                self.on_answer(response)
        if final:
            self.end()
        on_response = self._on_response
        if on_response is not None:
            try:
                on_response(response, final)
            # supervisor: one client's failing callback must not affect the others in the batch
            except Exception as error:
                context = {"message": "a response callback failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def end(self) -> None:
        """End the request without a response."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.ENDED
            self.on_answer = None  # it refers to this: the inputs would wait for the garbage collector
            if self.on_end is not None:
                self.on_end(self)

    def fail(self, error: Refused, model: str, version: str) -> None:
        """End the request with an error."""
        self.respond(InferResponse(model, version, self.request.id, error=error), True)
