"""Observes every request: latency, trace, and log line."""

from collections.abc import Mapping, Sequence
from itertools import count
from time import monotonic_ns

import structlog

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.statistics import ModelStatistics
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse
from forebay.modelserver.models.running.call import Call, Phase
from forebay.modelserver.ports import IndexEntry, ModelView
from forebay.modelserver.server import ModelServer
from forebay.modelserver.telemetry.latencies import Latencies
from forebay.modelserver.telemetry.logs import LogSettings
from forebay.modelserver.telemetry.trace_files import TraceFiles
from forebay.modelserver.telemetry.traced import (
    INPUT,
    OUTPUT,
    TRACED_TENSORS_MAX,
    Passage,
    Step,
    TracedTensor,
    kept,
    trace,
)
from forebay.modelserver.telemetry.tracing import TENSORS, Sampler, TraceSettings


class ObservedModels:
    """Wraps the model server for the fronts. Implements `ports.Models`."""

    def __init__(
        self,
        server: ModelServer,
        *,
        traces: TraceSettings,
        files: TraceFiles,
        logs: LogSettings,
        log: structlog.stdlib.BoundLogger,
        latencies: Latencies,
    ) -> None:
        self._server = server
        self._traces = traces
        self._files = files
        self._logs = logs
        self._log = log
        self._latencies = latencies
        self._ids = count(1)
        self.draining = False
        """Running requests are finished, then the server stops."""

    @property
    def ready(self) -> bool:
        """Whether the server and every model that should be served are ready."""
        return self._server.ready and not self.draining

    def view(self, name: str, version: str) -> ModelView:
        """The version of a model that serves requests for `version` (empty: the latest)."""
        return self._server.view(name, version)

    def labels(self, name: str, version: str, output: str) -> Sequence[str]:
        """Class labels of an output."""
        return self._server.labels(name, version, output)

    def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """Statistics of models."""
        return self._server.statistics(name, version)

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """The repository index."""
        return self._server.index(ready_only)

    async def refresh(self) -> None:
        """Scan the repositories for the index, unless that was done just now."""
        await self._server.refresh()

    async def load(self, name: str, parameters: Mapping[str, str | bytes | int | bool]) -> None:
        """Load or reload a model."""
        await self._server.load(name, parameters)

    async def unload(self, name: str, dependents: bool, version: str = "") -> None:
        """Unload a model, or one version."""
        await self._server.unload(name, dependents, version)

    def infer(self, request: InferRequest, on_response: OnResponse) -> "ObservedRequest":
        """Validate and queue a request."""
        sampler = None
        if not self._traces.off:
            sampler = self._traces.sampler(request.model)
            if not sampler.hit():
                sampler = None
        seen = ObservedRequest(self, request, on_response, sampler)
        try:
            seen.call = self._server.infer(request, seen.on_response)
            if sampler is not None:
                seen.call.watch = seen
        except Refused as refused:
            self.note(seen, refused)
            raise
        return seen

    def dropped(self, request: InferRequest) -> None:
        """Count a request that was displaced by a newer one before it was queued."""
        self._server.dropped(request)

    def note(self, seen: "ObservedRequest", error: Refused | None) -> None:
        """A request has ended; `error` is its final error."""
        now = seen.end_ns or monotonic_ns()
        call = seen.call
        if call is not None and error is None:
            self._latencies.observe(seen.model, seen.version, call, seen.first_ns or now, now)
        if seen.sampler is not None:
            self._files.add(seen.sampler, trace(self._ids, seen, now, seen.passage()))
            for step in seen.steps:
                step.forget()
        if self._logs.verbose:
            took_ns = now - call.started_ns if call is not None else 0
            self._log.debug(
                "request",
                model=seen.model,
                version=seen.version,
                id=seen.id,
                outcome=error.kind if error is not None else "ok",
                ms=round(took_ns / 1e6, 3),
            )


class ObservedRequest:
    """A request in flight; serves as its ticket."""

    __slots__ = (
        "_came_ns", "_front", "_keeps", "_on_response", "_owner", "_sent_ns", "call", "end_ns", "first_ns", "id",
        "model", "sampler", "steps", "tensors", "version",
    )  # fmt: skip

    def __init__(
        self, owner: ObservedModels, request: InferRequest, on_response: OnResponse, sampler: Sampler | None
    ) -> None:
        self._owner = owner
        self._on_response = on_response
        self.sampler = sampler
        self.model = request.model
        self.version = request.version
        self.id = request.id
        self._front = request.front
        self._came_ns = request.came_ns
        self._sent_ns = 0
        self.call: Call | None = None
        self.end_ns = 0
        self.first_ns = 0
        """When the first response came."""
        self.tensors: list[TracedTensor] = []
        """Traced tensors."""
        self.steps: tuple[Step, ...] = ()
        """Steps of an ensemble."""
        self._keeps = sampler is not None and TENSORS in sampler.setting.levels
        if self._keeps:
            self.tensors += kept(INPUT, request.inputs)

    def step(self, call: Call) -> Step:
        """An ensemble starts one of its steps."""
        step = Step(call, tensors=self._keeps)
        self.steps += (step,)
        return step

    def passage(self) -> Passage | None:
        """Its passage through its front; None: it came through none."""
        return Passage(self._front, self._came_ns, self._sent_ns) if self._came_ns else None

    def on_step_response(self, response: InferResponse | None, final: bool) -> None:
        """Responses are observed in `on_response`."""

    def cancel(self) -> None:
        """Cancel the request; no response is delivered after this."""
        call = self.call
        if call is not None and not call.cancelled and call.phase is not Phase.ENDED:
            call.cancel()
            self._owner.note(self, Refused(Kind.CANCELLED, "cancelled"))
            self._forget()

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """Deliver a response."""
        error = None
        if response is not None:
            error = response.error
            if not self.first_ns:
                self.first_ns = monotonic_ns()
                self.version = response.version or self.version
            if self._keeps and len(self.tensors) < TRACED_TENSORS_MAX:
                self.tensors += kept(OUTPUT, response.outputs)
        if final:
            self.end_ns = monotonic_ns()
        self._on_response(response, final)
        if final:
            if self.sampler is not None:
                self._sent_ns = monotonic_ns()
            self._owner.note(self, error)
            self._forget()

    def _forget(self) -> None:
        """Break reference cycles, so that bodies and responses are freed without the garbage collector."""
        self.call = None
        self._on_response = _nobody


def _nobody(response: InferResponse | None, final: bool) -> None:
    """Ignores responses after the end."""
