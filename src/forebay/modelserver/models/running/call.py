"""One request under way in one version of one model."""

import asyncio
from collections.abc import Callable
from enum import IntEnum
from time import monotonic_ns
from typing import Final, NamedTuple, Protocol

from forebay.core.serving.errors import Refused
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse
from forebay.modelserver.models.running.inputs import Checked


class Phase(IntEnum):
    """How far a request has come."""

    WAITING = 0
    """For an instance, or for its model to be loaded again."""
    RUNNING = 1
    ENDED = 2


class Runner(Protocol):
    """Who makes answers for the requests of one model version."""

    def submit(self, call: "Call") -> None:
        """Take a request. Raises `Refused` if it cannot wait; answers come later, never before this has returned."""

    def cancel(self, call: "Call") -> None:
        """Nobody waits for this request any more; its phase is as yet unchanged."""


class Watch(Protocol):
    """Who traces a request. Ensembles tell of their steps."""

    def step(self, call: "Call") -> "Watch":
        """A step of the request begins; who watches that."""

    def heard(self, response: InferResponse | None, final: bool) -> None:
        """A response of the step has come, or its end."""


class Spent(NamedTuple):
    """What an execution took, in nanoseconds."""

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


NOTHING_SPENT: Final = Spent()


class Call:
    """A request, its answer's way back, and its times (CLOCK_MONOTONIC, nanoseconds)."""

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
        """Where it runs: what the process has called its batch, and its place in there."""
        self.responses = 0
        self.cache_key = b""
        self.cache_ns = 0
        """How long it took to find that the cache has no answer."""
        self.spent = NOTHING_SPENT
        self.size_bytes = 0
        self.on_answer: Callable[[InferResponse], None] | None = None
        """Hears of each response before it goes out."""
        self.on_end: Callable[[Call], None] | None = None
        """Hears of the end, whatever it is."""
        self.watch: Watch | None = None

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for an answer."""
        return self._on_response is None

    def cancel(self) -> None:
        """Nobody waits for it any more; nothing is called after this."""
        if self._on_response is not None and self.phase is not Phase.ENDED:
            self._on_response = None
            if self.runner is not None:
                self.runner.cancel(self)

    def respond(self, response: InferResponse | None, final: bool) -> None:
        """Pass an answer on; the last one ends the request."""
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
            except Exception as error:  # supervisor: who asked cannot take it, but others share the batch
                context = {"message": "an answer could not be passed on", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def end(self) -> None:
        """It is over; says nothing to who asked."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.ENDED
            if self.on_end is not None:
                self.on_end(self)

    def fail(self, error: Refused, model: str, version: str) -> None:
        """End with an error."""
        self.respond(InferResponse(model, version, self.request.id, error=error), True)
