"""The generate endpoints: JSON fields instead of tensors, and streamed responses."""

from time import monotonic_ns
from typing import Final

import structlog

from forebay.core.serving.errors import Refused
from forebay.core.serving.values import Front, InferResponse
from forebay.modelserver.http.answering import deadline_of, fail, may_retry, refuse
from forebay.modelserver.ports import Models
from forebay.net.exchange import Exchange
from forebay.wire import http1
from forebay.wire.oip import documents
from forebay.wire.oip.coding import IDENTITY
from forebay.wire.oip.fields import invalid
from forebay.wire.oip.generate import event, read_generate, write_generate
from forebay.wire.oip.route import Route

EVENTS: Final = (b"content-type", b"text/event-stream; charset=utf-8")
_NOT_ONE: Final = invalid(
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


def start_generation(
    exchange: Exchange,
    models: Models,
    asked: Route,
    log: structlog.stdlib.BoundLogger,
    *,
    streams: bool,
    tensor_bytes_max: int,
    output_bytes_max: int,
) -> None:
    """Read a request and submit it to the models. Raises `Refused`."""
    came_ns = monotonic_ns()
    view = models.view(asked.model, asked.version)
    if (exchange.header(b"content-encoding") or b"").strip().lower() not in (b"", IDENTITY):
        raise invalid("Unsupported content-encoding, only 'identity' is supported.")
    request = read_generate(view.config, asked.version, exchange.body, tensor_bytes_max=tensor_bytes_max)
    request.deadline, request.front, request.came_ns = deadline_of(exchange), Front.HTTP, came_ns
    answer = Generation(exchange, log, streams=streams, output_bytes_max=output_bytes_max)
    exchange.on_disconnect = models.infer(request, answer.on_response).cancel


class Generation:
    """A request in flight whose responses are sent as JSON.

    When streaming, the status is that of the first response, and later errors are sent in the stream. Otherwise there
    must be exactly one response.
    """

    __slots__ = ("_body", "_count", "_exchange", "_log", "_output_bytes_max", "_status", "_streams")

    def __init__(
        self, exchange: Exchange, log: structlog.stdlib.BoundLogger, *, streams: bool, output_bytes_max: int
    ) -> None:
        self._exchange = exchange
        self._log = log
        self._streams = streams
        self._output_bytes_max = output_bytes_max
        self._count = 0
        self._status = 200
        self._body = b""

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """Send or keep a response; finish with the final one."""
        exchange = self._exchange
        if exchange.finished:
            return
        status, data = 200, b""
        try:
            if response is not None:
                if response.error is not None:
                    raise response.error
                data = write_generate(response, tensor_bytes_max=self._output_bytes_max)
        except Refused as refused:
            if not exchange.started and may_retry(exchange, refused):
                refuse(exchange, refused)
                return
            status, data = refused.http_status, documents.error(refused.text)
        # supervisor: a bug in writing one response must not affect the model's other callbacks
        except Exception as error:
            fail(exchange, self._log, error)
            return
        if self._streams:
            self._stream(status, data, final)
        else:
            self._collect(status, data, final)

    def _stream(self, status: int, data: bytes, final: bool) -> None:
        exchange = self._exchange
        if not exchange.started:
            exchange.start(status, [EVENTS])
        if data:
            exchange.write(event(data))
        if final:
            exchange.end()

    def _collect(self, status: int, data: bytes, final: bool) -> None:
        if data and self._status == 200:  # the first error is the response
            self._count += 1
            self._status, self._body = status, data
        if not final:
            return
        if self._status == 200 and self._count != 1:
            refuse(self._exchange, _NOT_ONE)
        else:
            self._exchange.respond(self._status, [http1.JSON], self._body)
