"""ModelInfer: one request, one answer."""

import asyncio
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferResponse
from forebay.modelserver.ports import Models
from forebay.modelserver.regions import SharedRegions
from forebay.modelserver.rpc.requests import read_request
from forebay.modelserver.rpc.responses import Writer

_DECOUPLED: Final = "ModelInfer RPC doesn't support models with decoupled transaction policy"


async def infer(models: Models, memory: SharedRegions, message: Any) -> Any:
    """The answer to a ModelInferRequest. Raises `Refused`. Cancelling it cancels the request."""
    view = models.view(message.model_name, message.model_version)
    if view.config.decoupled:
        raise Refused(Kind.UNSUPPORTED, _DECOUPLED)
    asked = read_request(message, view.config, memory)
    answer = _Answer(Writer(models, view, asked.wanted), asyncio.get_running_loop().create_future())
    ticket = models.infer(asked.request, answer.on_response)
    try:
        return await answer.future
    except asyncio.CancelledError:
        ticket.cancel()
        raise


class _Answer:
    """Collects the one response that there must be."""

    __slots__ = ("_count", "_error", "_message", "_writer", "future")

    def __init__(self, writer: Writer, future: "asyncio.Future[Any]") -> None:
        self._writer = writer
        self.future = future
        self._message = pb.ModelInferResponse()
        self._error: Exception | None = None
        self._count = 0

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """Keep the response; the last word settles it."""
        if self.future.done():
            return
        if response is not None:
            self._count += 1
            if self._error is None and self._count == 1:
                try:
                    self._writer.fill(self._message, response)
                except Exception as error:  # supervisor: a mistake with one answer must not stop those who call back
                    self._error = error
        if not final:
            return
        if self._error is None and self._count != 1:
            self._error = Refused(Kind.INTERNAL, f"expected a single response, got {self._count}")
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._message)
