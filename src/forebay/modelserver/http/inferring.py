"""The infer endpoint: one request, one response.

Tensors are never copied on the way in, as they are views of the body, and once on the way out, when the parts of the
response are joined. When a callback returns, everything needed has been copied from the response's buffers, so their
owner may reuse them.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Final, ParamSpec, TypeVar

import structlog

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Buffer, Front, InferRequest, InferResponse
from forebay.modelserver.http.answering import deadline_of, fail, refuse
from forebay.modelserver.ports import Models, ModelView
from forebay.modelserver.process.segments import Staging
from forebay.net.exchange import Exchange
from forebay.wire import http1
from forebay.wire.oip.coding import CODINGS, IDENTITY, answer_coding, decoded, encoded
from forebay.wire.oip.fields import invalid
from forebay.wire.oip.infer_answer import CLASSIFIED_AT_ONCE_MAX, check_json_size, classifies_long, write_infer
from forebay.wire.oip.infer_request import (
    LENGTH_DIGITS_MAX,
    LENGTH_HEADER,
    RESERVED,
    RESERVED_PREFIX,
    Asked,
    json_length,
    read_infer,
    read_raw,
)
from forebay.wire.oip.ports import Memory
from forebay.wire.oip.route import Route

P = ParamSpec("P")
T = TypeVar("T")
BINARY = (b"content-type", b"application/octet-stream")
PACKED_AT_ONCE_BYTES_MAX: Final = 65_536
"""Compressing this much takes milliseconds; more is left to a thread."""
UNPACKED_AT_ONCE_BYTES_MAX: Final = 8192
"""Size of a compressed body, which may expand a thousandfold."""
JSON_AT_ONCE_BYTES_MAX: Final = 1 << 20
"""Above this size, JSON and tensors in JSON are read and written in a thread, one request after the other. That is no
faster, but does not block the event loop.
"""
WAITING_BODIES_BYTES_MAX: Final = 2 * 2**30
"""Bodies that are being read in a thread or wait for it; more are rejected, but a lone one may have any size."""
WAITING_ANSWERS: Final = 8
"""Large responses that may wait to be written as JSON, in multiples of the largest one allowed; more are rejected."""
_LENGTH_HEADER = LENGTH_HEADER.encode()
_LENGTH_FIELD = _LENGTH_HEADER.lower()
_JSON = (http1.JSON,)


class Inferring:
    """Reads requests and submits them to the models."""

    def __init__(
        self,
        models: Models,
        memory: Memory,
        tasks: asyncio.TaskGroup,
        log: structlog.stdlib.BoundLogger,
        *,
        json_bytes_max: int,
        json_output_bytes_max: int,
        strings_max: int,
        forwarded: re.Pattern[str] | None,
        staging: Staging | None = None,
    ) -> None:
        self.models = models
        self._memory = memory
        self.tasks = tasks
        self.log = log
        self._json_bytes_max = json_bytes_max
        self.reading_bytes = 0
        """Bytes of bodies that are being read in a thread or wait for it."""
        self.json_output_bytes_max = json_output_bytes_max
        self.waiting_bytes = 0
        """Bytes of outputs that are being written as JSON or wait for it."""
        self._strings_max = strings_max
        self._forwarded = forwarded
        self._staging = staging
        self._apart = asyncio.Lock()

    def place(self, exchange: Exchange, size: int) -> memoryview | None:
        """Memory for the body of a request with binary tensors, from where the model's process can read them."""
        length = exchange.header(_LENGTH_FIELD)
        if self._staging is None or length is None or exchange.header(b"content-encoding") is not None:
            return None
        if not exchange.target.endswith(b"/infer"):  # clients may send the header everywhere
            return None
        return self._staging.take(size, int(length) if length.isdigit() and len(length) <= LENGTH_DIGITS_MAX else 0)

    def start(self, exchange: Exchange, asked: Route) -> None:
        """Read a request and submit it to the models. Raises `Refused`."""
        came_ns = monotonic_ns()
        view = self.models.view(asked.model, asked.version)
        if view.config.decoupled:
            raise Refused(Kind.UNSUPPORTED, "HTTP end point doesn't support models with decoupled transaction policy")
        deadline = deadline_of(exchange)
        if len(_body(exchange)) > UNPACKED_AT_ONCE_BYTES_MAX and _reads_long(exchange):
            size = len(_body(exchange))
            if self.reading_bytes and self.reading_bytes + size > WAITING_BODIES_BYTES_MAX:
                raise Refused(Kind.UNAVAILABLE, "too many large requests are waiting to be read; send binary tensors")
            self.reading_bytes += size
            self.tasks.create_task(self._start_later(exchange, asked, view, deadline, came_ns))
        else:
            self._go_on(exchange, self._read(exchange, asked, view), view, deadline, came_ns)

    def _read(self, exchange: Exchange, asked: Route, view: ModelView) -> Asked:
        """Read a request. Raises `Refused`."""
        body = _body(exchange)
        coding = exchange.header(b"content-encoding")
        if coding is not None:
            try:
                body = decoded(coding, exchange.body, self._json_bytes_max)
            except Refused:
                exchange.extra += b"accept-encoding: %b\r\n" % CODINGS
                raise
        length = json_length(exchange.header(_LENGTH_FIELD), len(body))
        if length == 0:
            return read_raw(view.config, asked.version, body)
        return read_infer(
            asked.model,
            asked.version,
            body,
            length,
            self._memory,
            json_bytes_max=self._json_bytes_max,
            strings_max=self._strings_max,
        )

    def _go_on(self, exchange: Exchange, read: Asked, view: ModelView, deadline: float, came_ns: int) -> None:
        """Submit a request to the models. Raises `Refused`."""
        if self._forwarded is not None:
            forward(exchange, self._forwarded, read.request)
        request = read.request
        request.deadline, request.front, request.came_ns = deadline, Front.HTTP, came_ns
        answer = Inference(exchange, read, view, self)
        exchange.on_disconnect = self.models.infer(request, answer.on_response).cancel

    async def _start_later(
        self, exchange: Exchange, asked: Route, view: ModelView, deadline: float, came_ns: int
    ) -> None:
        try:
            read = await self.apart(self._read, exchange, asked, view)
            if not exchange.finished:
                self._go_on(exchange, read, view, deadline, came_ns)
        except Refused as refused:
            refuse(exchange, refused)
        except Exception as error:  # supervisor: a bug costs one response, not the task group of the server
            fail(exchange, self.log, error)
        finally:
            self.reading_bytes -= len(_body(exchange))

    async def apart(self, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Run something in a thread, one call at a time."""
        async with self._apart:
            return await asyncio.to_thread(work, *given, **named)


def _body(exchange: Exchange) -> Buffer:
    return exchange.body if exchange.placed is None else exchange.placed


def _reads_long(exchange: Exchange) -> bool:
    if exchange.header(b"content-encoding") is not None:
        return True
    size = len(_body(exchange))
    if size <= JSON_AT_ONCE_BYTES_MAX:
        return False
    length = json_length(exchange.header(_LENGTH_FIELD), size)
    return length is None or length > JSON_AT_ONCE_BYTES_MAX


def forward(exchange: Exchange, names: re.Pattern[str], request: InferRequest) -> None:
    """Turn headers with matching names into request parameters. Raises `Refused`."""
    for name, value in exchange.headers:
        key = name.decode("latin-1")
        if names.search(key) is None:
            continue
        if key in RESERVED or key.startswith(RESERVED_PREFIX):
            raise invalid(f"Header '{key}' is reserved for Triton usage and cannot be forwarded.")
        request.parameters[key] = _text(value)


def _text(value: bytes) -> str:
    """The value of a header: UTF-8, or else Latin-1, as RFC 9110 has it of old."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class Inference:
    """A request in flight that gets one response."""

    __slots__ = (
        "_asked",
        "_body",
        "_exchange",
        "_headers",
        "_known",
        "_long",
        "_owner",
        "_refused",
        "_responses",
        "_view",
    )

    def __init__(self, exchange: Exchange, asked: Asked, view: ModelView, owner: Inferring) -> None:
        self._exchange = exchange
        self._asked = asked
        self._view = view
        self._owner = owner
        self._responses = 0
        self._known: dict[str, Sequence[str]] = {}
        """Labels by output, as far as they have been looked up."""
        self._long: InferResponse | None = None
        """Copy of a response that takes long to write."""
        self._refused: Refused | None = None
        self._headers: tuple[http1.Header, ...] = ()
        self._body = b""

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """Keep the response; send it when it is final."""
        exchange = self._exchange
        if exchange.finished:
            return
        try:
            if response is not None:
                self._responses += 1
                if response.error is not None:
                    raise response.error
                if self._responses == 1:
                    if self._writes_long(response):
                        self._keep(response)
                    else:
                        self._write(response)
        except Refused as refused:
            self._refused = refused.with_traceback(None)  # which refers to this
        # supervisor: a bug in writing one response must not affect the model's other callbacks
        except Exception as error:
            fail(exchange, self._owner.log, error)
            return
        if final:
            if self._refused is None and self._responses != 1:
                self._refused = Refused(Kind.INTERNAL, f"expected a single response, got {self._responses}")
            if self._refused is not None:
                refuse(exchange, self._refused)
            elif self._long is not None:
                exchange.on_disconnect = None  # there is nothing left to cancel; the writer checks `finished`
                self._owner.waiting_bytes += _size(self._long)
                self._owner.tasks.create_task(self._write_later(self._long))
            else:
                self._send()

    def _keep(self, response: InferResponse) -> None:
        """Copy a response that takes long to write. Raises `Refused`."""
        owner, size = self._owner, _size(response)
        if owner.waiting_bytes and owner.waiting_bytes + size > WAITING_ANSWERS * owner.json_output_bytes_max:
            raise Refused(Kind.UNAVAILABLE, "too many large responses are being written as JSON; request binary_data")
        for tensor in response.outputs:
            if self._asked.forms.get(tensor.name, self._asked.others).classes:
                self._labels(tensor.name)  # now: the model may be unloaded before they are needed
        self._long = response.copied()

    def _writes_long(self, response: InferResponse) -> bool:
        """Whether a large output becomes JSON or is classified. Raises `Refused` if the JSON would be too large."""
        most = self._owner.json_output_bytes_max
        size = _size(response)
        if size > most:
            check_json_size(response, self._asked, most)
        if size <= JSON_AT_ONCE_BYTES_MAX and size <= CLASSIFIED_AT_ONCE_MAX:
            return False
        for tensor in response.outputs:
            form = self._asked.forms.get(tensor.name, self._asked.others)
            if form.classes and classifies_long(tensor, form.classes):
                return True
            as_json = form.classes or not (form.binary or form.target is not None)
            if as_json and len(tensor.data) > JSON_AT_ONCE_BYTES_MAX:
                return True
        return False

    async def _write_later(self, response: InferResponse) -> None:
        try:
            await self._owner.apart(self._write, response)
        except Refused as refused:
            refuse(self._exchange, refused)
        except Exception as error:  # supervisor: a bug costs one response, not the task group of the server
            fail(self._exchange, self._owner.log, error)
        else:
            self._send()
        finally:
            self._long = None
            self._owner.waiting_bytes -= _size(response)

    def _wanted(self) -> bool:
        return not self._exchange.finished

    def _write(self, response: InferResponse) -> None:
        """Serialize the response; copies everything out of its buffers."""
        if self._exchange.finished:
            raise Refused(Kind.CANCELLED, "the client has disconnected")
        written = write_infer(
            response,
            self._asked,
            batches=self._view.config.max_batch > 0,
            labels=self._labels,
            wanted=self._wanted,
        )
        json = written.json
        if written.buffers:
            self._headers = (BINARY, (_LENGTH_HEADER, b"%d" % len(json)))
            self._body = b"".join((json, *written.buffers))
        else:
            self._headers = _JSON
            self._body = json

    def _send(self) -> None:
        exchange, body = self._exchange, self._body
        accepted = exchange.header(b"accept-encoding")
        coding = IDENTITY if accepted is None else answer_coding(accepted)
        if coding == IDENTITY:
            exchange.respond(200, self._headers, body)
            return
        self._headers = (*self._headers, (b"content-encoding", coding))
        if len(body) <= PACKED_AT_ONCE_BYTES_MAX:
            exchange.respond(200, self._headers, encoded(coding, body))
        else:
            exchange.on_disconnect = None  # there is nothing left to cancel
            self._owner.tasks.create_task(self._send_packed(coding))

    async def _send_packed(self, coding: bytes) -> None:
        body = await asyncio.to_thread(encoded, coding, self._body)
        self._exchange.respond(200, self._headers, body)

    def _labels(self, output: str) -> Sequence[str]:
        labels = self._known.get(output)
        if labels is None:
            view = self._view
            labels = self._known[output] = self._owner.models.labels(view.config.name, view.version, output)
        return labels


def _size(response: InferResponse) -> int:
    size = 0
    for tensor in response.outputs:
        size += len(tensor.data)
    return size
