"""One model of a model server, under the name that a cluster has for it, with its requests counted."""

from asyncio import Event, get_running_loop
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from forebay.core.errors import CLIENT_CLOSED, OK, Code
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.statistics import ModelStatistics
from forebay.core.serving.values import InferRequest, InferResponse, OnResponse, Ticket
from forebay.modelserver.ports import IndexEntry, Models, ModelView
from forebay.obs.metrics import Metrics

CODES: Final = {
    Kind.NOT_FOUND: Code.MODEL_NOT_FOUND,
    Kind.UNAVAILABLE: Code.OVERLOADED,
    Kind.INTERNAL: Code.INTERNAL,
    Kind.UNKNOWN: Code.INTERNAL,
}
"""Error codes for metrics; all other kinds are client errors."""
ENDPOINT: Final = "infer"
_FIXED: Final = "The cluster file determines what runs; models cannot be loaded or unloaded here."


class AliasedModel:
    """Implements `modelserver.ports.Models` for the model `model` of `server`, which clients call `name`.

    `strict`: the server is ready only if all of its models are, so its readiness covers this model.
    """

    def __init__(
        self, server: Models, name: str, model: str, metrics: Metrics, replica: str, *, strict: bool
    ) -> None:
        self._server = server
        self._strict = strict
        self._metrics = metrics
        self._labels = (name, replica)
        self._e2e = metrics.histogram("worker_e2e_seconds", *self._labels, ENDPOINT)
        self._ok = metrics.counter("worker_requests_total", *self._labels, ENDPOINT, OK)
        self._shown: dict[str, tuple[Mapping[str, Any], ModelView]] = {}
        """By version: the server's document, and the view under this name."""
        self.name = name
        self.model = model
        self.in_flight = 0
        """Inferences in flight."""
        self._idle: Event | None = None

    @property
    def ready(self) -> bool:
        """Whether the model is served by responsive processes."""
        if self._strict or not self._server.ready:
            return self._server.ready
        try:
            self._server.view(self.model, "")
        except Refused:
            return False
        return True

    def view(self, name: str, version: str) -> ModelView:
        """The version that serves requests for `version` (empty: the latest)."""
        self._check(name)
        try:
            view = self._server.view(self.model, version)
        except Refused as refused:
            raise self.reworded(refused) from None
        if self.name == self.model:
            return view
        shown = self._shown.get(view.version)
        if shown is None or shown[0] is not view.document or shown[1].versions != view.versions:
            document = {**view.document, "name": self.name}
            renamed = replace(view, config=replace(view.config, name=self.name), document=document)
            shown = self._shown[view.version] = view.document, renamed
        return shown[1]

    def labels(self, name: str, version: str, output: str) -> Sequence[str]:
        """Class labels of an output."""
        self._check(name)
        return self._server.labels(self.model, version, output)

    def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        """Statistics of the model, whether or not `name` is given."""
        if name:
            self._check(name)
        return [replace(each, name=self.name) for each in self._server.statistics(self.model, version)]

    def index(self, ready_only: bool) -> Sequence[IndexEntry]:
        """The model's versions."""
        found = self._server.index(ready_only)
        return [replace(each, name=self.name) for each in found if each.name == self.model]

    async def refresh(self) -> None:
        """Scan the repository for the index, unless that was done just now."""
        await self._server.refresh()

    async def load(self, name: str, parameters: Mapping[str, str | bytes | int | bool]) -> None:
        """Not supported."""
        raise Refused(Kind.UNSUPPORTED, _FIXED)

    async def unload(self, name: str, dependents: bool, version: str = "") -> None:
        """Not supported."""
        raise Refused(Kind.UNSUPPORTED, _FIXED)

    def infer(self, request: InferRequest, on_response: OnResponse) -> Ticket:
        """Validate and queue a request."""
        self._check(request.model)
        request.model = self.model
        under = _Underway(self, on_response)
        self.in_flight += 1
        try:
            under.ticket = self._server.infer(request, under.on_response)
        except Refused as refused:
            under.end(code_of(refused))
            raise self.reworded(refused) from None
        except BaseException:
            under.end(Code.INTERNAL)
            raise
        return under

    def dropped(self, request: InferRequest) -> None:
        """Count a request that was displaced by a newer one before it was queued."""
        self._check(request.model)
        request.model = self.model
        self._metrics.counter("worker_requests_total", *self._labels, ENDPOINT, Code.OVERLOADED).inc()
        self._server.dropped(request)

    def reworded(self, refused: Refused) -> Refused:
        """The error, with the model's name as clients know it."""
        if self.name == self.model:
            return refused
        text = refused.text.replace(f"'{self.model}'", f"'{self.name}'")
        return Refused(refused.kind, text, refused.retry_after_s)

    async def idle(self) -> None:
        """Wait until no inference is in flight."""
        self._idle = Event()
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()

    def ended(self, code: str, began: float) -> None:
        """An inference has ended with that outcome."""
        self.in_flight -= 1
        if self._idle is not None:
            self._idle.set()
        if code == OK:
            self._ok.value += 1
            self._e2e.observe(get_running_loop().time() - began)
        else:
            self._metrics.counter("worker_requests_total", *self._labels, ENDPOINT, code).inc()

    def _check(self, name: str) -> None:
        if name != self.name:
            raise Refused(Kind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")


class _Underway:
    """An inference in flight; ends exactly once."""

    __slots__ = ("_aliased", "_began", "_on_response", "_over", "ticket")

    def __init__(self, aliased: AliasedModel, on_response: OnResponse) -> None:
        self._aliased = aliased
        self._on_response = on_response
        self._began = get_running_loop().time()
        self._over = False
        self.ticket: Ticket | None = None

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """Deliver a response under the requested name."""
        code = OK
        if response is not None:
            response.model = self._aliased.name
            if response.error is not None:
                code = code_of(response.error)
                response.error = self._aliased.reworded(response.error)
        on_response = self._on_response
        if final:
            self.end(code)
        on_response(response, final)

    def cancel(self) -> None:
        """Cancel the inference."""
        ticket = self.ticket
        self.end(CLIENT_CLOSED)
        if ticket is not None:
            ticket.cancel()

    def end(self, code: str) -> None:
        """Record the end, once."""
        if not self._over:
            self._over = True
            self.ticket = None  # both refer to this: the inputs would wait for the garbage collector
            self._on_response = _nobody
            self._aliased.ended(code, self._began)


def _nobody(response: InferResponse | None, final: bool) -> None:
    """Ignores responses after the end."""


def code_of(refused: Refused) -> Code:
    """The error code for an error of the protocol."""
    return CODES.get(refused.kind, Code.INVALID_REQUEST)
