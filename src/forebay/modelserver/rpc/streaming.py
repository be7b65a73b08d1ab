"""ModelStreamInfer: many requests on one stream, each with any number of responses.

Responses of ordinary models are sent in request order, across all models; those of decoupled models are sent as they
come. An error of one request is reported in the stream, which goes on; that of a model ends it if the client has set
the header `triton_grpc_error`.

What a stream may hold is bounded at both ends: no requests are read while too many are in flight, and a client that
does not read its responses is cut off.
"""

from collections import deque
from time import monotonic_ns
from typing import Any, Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Front, InferResponse, Ticket
from forebay.modelserver.rpc.calls import (
    CODES,
    DRAINING,
    PACKED_AT_ONCE_BYTES_MAX,
    Call,
    Head,
    Link,
    RpcContext,
    forward,
)
from forebay.modelserver.rpc.requests import Asked, parse, read_request
from forebay.modelserver.rpc.responses import FINAL, Writer, set_parameters, varint
from forebay.wire.http2.grpc import (
    INTERNAL,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    BadMessage,
    Messages,
    Place,
    answer_head,
    answer_tail,
    framed,
    packed,
)
from forebay.wire.http2.streams import Stream
from forebay.wire.oip.documents import ERROR_CHARS_MAX

UNDER_WAY_MAX: Final = 1024
"""Requests per stream that run, or whose responses wait for those of earlier ones. Beyond this, no more are read."""
UNSENT_MAX: Final = 4096
UNSENT_BYTES_MAX: Final = 256 * 2**20
"""Responses per stream that the client has not read. Beyond this, the stream ends."""
_BEHIND: Final = "the client does not read its responses: too many are waiting to be sent"
_DONE: Final = answer_tail(OK)
_DONE_ALONE: Final = answer_tail(OK, alone=True)
_ANSWER: Final = b"\x12"
"""Tag of `infer_response` in ModelStreamInferResponse: field 2, length-delimited."""


def _final_parameter(final: bool) -> bytes:
    """The final-response parameter, encoded as a fragment of a ModelInferResponse."""
    message = pb.ModelInferResponse()
    set_parameters(message.parameters, {FINAL: final})
    return message.SerializeToString()  # type: ignore[no-any-return]


_FINAL: Final = _final_parameter(True)
_MORE: Final = _final_parameter(False)


class Streaming(Call):
    """One stream, from its first request to its last response."""

    __slots__ = ("_backlog", "_draining", "_ended", "_feeding", "_frames", "_ordered", "_under_way")

    def __init__(self, context: RpcContext, session: Link, stream: Stream, head: Head) -> None:
        super().__init__(context, session, stream, head)
        self._under_way: dict[_Turn, None] = {}
        self._ordered: deque[_Turn] = deque()
        """Requests to ordinary models, in the order in which their responses must be sent."""
        self._frames: dict[tuple[str, str], Frames] = {}
        self._backlog: deque[tuple[bytes | memoryview, bool]] = deque()
        """Requests that wait for decompression, or because too many are in flight. Meanwhile flow control stops the
        client.
        """
        self._feeding = False
        self._ended = False
        """The client has sent its last request."""
        self._draining = False

    def on_message(self, message: bytes | memoryview) -> None:
        """Queue one request."""
        self._keep(bytes(message), False)

    def _place(self) -> Place | None:
        return self.context.place

    def _keep(self, message: bytes | memoryview, packed: bool) -> None:
        self._backlog.append((message, packed))

    def _collect(self, messages: Messages, data: bytes | memoryview, ended: bool) -> None:
        messages.feed(data, self._keep)
        if ended and messages.waiting:
            raise BadMessage(INTERNAL, "the stream ends within a message")

    def on_data(self, data: bytes | memoryview, ended: bool) -> None:
        """Take requests, and start as many as may be in flight."""
        super().on_data(data, ended)
        self._ended = ended
        self._feed()

    def on_gone(self) -> None:
        """Cancel all requests in flight."""
        self._backlog.clear()
        others = list(self._under_way)
        self._under_way.clear()
        self._ordered.clear()  # what refers to this stream would wait for the garbage collector, with its inputs
        self._frames.clear()
        for other in others:
            other.cancel()

    def on_drain(self) -> None:
        """End as soon as nothing is in flight."""
        self._draining = True
        self._feed()

    def refuse(self, code: int, text: str, retry_after_s: int = 0) -> None:
        """End the stream with that status, and cancel all requests in flight."""
        super().refuse(code, text, retry_after_s)
        self.on_gone()

    def _feed(self) -> None:
        if self._feeding or self.over:
            return
        self._feeding = True
        backlog, under_way = self._backlog, self._under_way
        while backlog and len(under_way) < UNDER_WAY_MAX:
            message, is_packed = backlog[0]
            if is_packed:
                self.stream.held = True
                self.context.tasks.create_task(self._unpack_first(message))
                return
            backlog.popleft()
            self._start(message)
        self._feeding = False
        if self.over:
            return
        if backlog:
            self.stream.held = True
        elif self.stream.held:
            self.session.release(self.stream)
            self.session.wake()
        if backlog or under_way:
            return
        if self._ended:
            self._end()
            self.session.finish(self.stream, _DONE if self.begun else _DONE_ALONE)
            self.session.wake()
        elif self._draining:
            self.refuse(UNAVAILABLE, DRAINING)

    async def _unpack_first(self, message: bytes | memoryview) -> None:
        try:
            data = await self.context.unpack(message, self.head.coding)
        except Exception as error:  # supervisor: a bug costs one call
            self.fail(error)
        else:
            if self._backlog:
                self._backlog[0] = data, False
        self._feeding = False
        self._feed()

    def _start(self, data: bytes | memoryview) -> None:
        came_ns = monotonic_ns()
        try:
            message, raw = parse(data)
        except (BadMessage, DecodeError) as error:
            self.fail(error)
            return
        turn = _Turn(self, message)
        self._under_way[turn] = None
        models = self.context.models
        try:
            view = models.view(message.model_name, message.model_version)
            turn.decoupled = view.config.decoupled
            if not turn.decoupled:
                self._ordered.append(turn)
            asked = read_request(message, raw, view.config, self.context.regions)
            if self.head.forwarded:
                forward(self.head, asked.request)
            asked.request.front, asked.request.came_ns = Front.GRPC, came_ns
            turn.expect(Writer(models, view, asked.wanted), asked)
            if asked.drop_oldest is None:
                turn.submit()
            else:
                key = message.model_name, message.model_version
                frames = self._frames.get(key)
                if frames is None:
                    frames = self._frames[key] = Frames()
                frames.offer(turn, asked.drop_oldest, view.abreast)
        except Exception as error:  # supervisor: a failing request must not end the stream
            if not turn.decoupled and turn not in self._ordered:
                self._ordered.append(turn)
            turn.fail(error)

    # --- called by turns

    def told(self, turn: "_Turn") -> None:
        """A request has a response, or has ended."""
        if turn.decoupled:
            self._send(turn)
        else:
            ordered = self._ordered
            while ordered and ordered[0].ended:
                self._send(ordered.popleft())
        if turn.ended:
            self._feed()

    def end_with(self, error: Exception) -> None:
        """End the stream with a model's error, after the responses before it, and cancel all requests in flight."""
        if self.over:
            return
        self._end()
        refused = error if isinstance(error, Refused) else Refused(Kind.INTERNAL, "internal error")
        tail = answer_tail(CODES[refused.kind], refused.text, refused.retry_after_s, alone=not self.begun)
        self.session.finish(self.stream, tail)
        self.session.wake()
        self.on_gone()

    def _send(self, turn: "_Turn") -> None:
        messages, turn.messages = turn.messages, []
        if turn.ended:
            self._under_way.pop(turn, None)
        if self.over:
            return
        session, stream, packing = self.session, self.stream, self.head.packing
        if messages and not self.begun:
            self.begun = True
            session.head(stream, answer_head(packing))
        for message in messages:
            small = len(message) <= PACKED_AT_ONCE_BYTES_MAX
            session.send(stream, packed(message, packing) if packing and small else framed(message))
        session.wake()
        unsent = len(stream.queue)
        if unsent > UNSENT_MAX or (stream.queued_bytes > UNSENT_BYTES_MAX and unsent > 1):
            self.refuse(RESOURCE_EXHAUSTED, _BEHIND)


class _Turn:
    """One request of a stream."""

    __slots__ = (
        "_asked",
        "_id",
        "_late",
        "_model",
        "_stream",
        "_ticket",
        "_version",
        "_writer",
        "decoupled",
        "ended",
        "frames",
        "messages",
    )

    def __init__(self, stream: Streaming, message: Any) -> None:
        self._stream = stream
        self._model = message.model_name
        self._version = message.model_version
        self._id = message.id
        self._asked: Asked | None = None
        self._writer: Writer | None = None
        self._ticket: Ticket | None = None
        self._late: deque[_Late] = deque()
        """Responses from the first one that is still being encoded in a thread."""
        self.decoupled = False
        self.ended = False
        self.frames: Frames | None = None
        self.messages: list[bytes] = []
        """Encoded responses that have not been sent."""

    def expect(self, writer: Writer, asked: Asked) -> None:
        """Set how responses are written."""
        self._writer = writer
        self._asked = asked

    def submit(self) -> None:
        """Submit the request to the models. Raises `Refused`."""
        assert self._asked is not None
        self._ticket = self._stream.context.models.infer(self._asked.request, self.on_response)

    def drop(self, why: str) -> None:
        """End the request before it is submitted; the model counts it as rejected."""
        assert self._asked is not None
        self.frames = None
        self._stream.context.models.dropped(self._asked.request)
        self.fail(Refused(Kind.UNAVAILABLE, why))

    def cancel(self) -> None:
        """Cancel the request."""
        self.frames = None
        if not self.ended and self._ticket is not None:
            self._ticket.cancel()

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """Encode one response."""
        if self.ended:
            return
        assert self._writer is not None
        assert self._asked is not None
        if self._late or (response is not None and self._writer.takes_long(response)):
            self._delay(response, final)
            return
        if response is not None:
            self._note(response, final)
        elif self.decoupled and final and self._asked.empty_final:
            self._name("", final)
        self._end_if(final)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        message = pb.ModelStreamInferResponse(error_message=self._text(error))
        message.infer_response.id = self._id
        self.messages.append(message.SerializeToString())
        self._end_if(True)

    def _note(self, response: InferResponse, final: bool) -> None:
        assert self._writer is not None
        try:
            answer = self._writer.write(response)
        # supervisor: a bug in writing one response must not affect the model's other callbacks
        except Exception as error:
            self._note_error(error, final)
        else:
            self._note_answer(answer, final)

    def _note_answer(self, answer: bytes, final: bool) -> None:
        said = _FINAL if final else _MORE
        self.messages.append(b"".join((_ANSWER, varint(len(answer) + len(said)), answer, said)))

    def _note_error(self, error: Exception, final: bool) -> None:
        text = self._text(error)
        if self._stream.head.error_ends:
            self._stream.end_with(error)
        else:
            self._name(text, final)

    def _delay(self, response: InferResponse | None, final: bool) -> None:
        """Encode a response that takes long, or follows such a one."""
        assert self._writer is not None
        context, late = self._stream.context, _Late(final)
        self._late.append(late)
        try:
            if response is not None and self._writer.takes_long(response):
                self._writer.look_up(response)
                kept = context.kept(response)
                late.ready = False
                context.tasks.create_task(self._encode(kept, late))
            elif response is not None:
                late.answer = self._writer.write(response)
        # supervisor: a bug in writing one response must not affect the model's other callbacks
        except Exception as error:
            late.error = error
        self._pass_on()

    async def _encode(self, response: InferResponse, late: "_Late") -> None:
        try:
            late.answer = await self._stream.context.write(self._write, response)
        except Exception as error:  # supervisor: a bug costs one response
            late.error = error
        late.ready = True
        self._pass_on()

    def _write(self, response: InferResponse) -> bytes:
        assert self._writer is not None
        if self._stream.over:
            raise Refused(Kind.CANCELLED, "the stream has ended")
        return self._writer.write(response)

    def _pass_on(self) -> None:
        while self._late and self._late[0].ready and not self._stream.over:
            late = self._late.popleft()
            if late.error is not None:
                self._note_error(late.error, late.final)
            elif late.answer:
                self._note_answer(late.answer, late.final)
            elif self.decoupled and late.final and self._asked is not None and self._asked.empty_final:
                self._name("", True)
            self._end_if(late.final)

    def _name(self, problem: str, final: bool) -> None:
        """A response without outputs that identifies its request."""
        message = pb.ModelStreamInferResponse(error_message=problem)
        answer = message.infer_response
        answer.id = self._id
        answer.model_name = self._model
        answer.model_version = self._version
        answer.parameters[FINAL].bool_param = final
        self.messages.append(message.SerializeToString())

    def _text(self, error: Exception) -> str:
        if isinstance(error, Refused):
            error.__traceback__ = None  # it refers to the response that has this error
            return error.text[:ERROR_CHARS_MAX]
        self._stream.context.log.error("request handling failed", model=self._model[:200], exc_info=error)
        return "internal error"

    def _end_if(self, final: bool) -> None:
        self.ended = final
        if final:
            self._asked = None  # its response may wait for those of earlier requests, and needs no inputs
        self._stream.told(self)
        if final and self.frames is not None:
            self.frames.ended()


class _Late:
    """A response that must not overtake one that is still being encoded."""

    __slots__ = ("answer", "error", "final", "ready")

    def __init__(self, final: bool) -> None:
        self.answer = b""
        """Empty: there is only the end of the request to be told."""
        self.error: Exception | None = None
        self.final = final
        self.ready = True


class Frames:
    """Requests of one stream for one model of which only the newest matter, such as video frames.

    As many run as the model has instances; waiting ones are dropped for newer ones, oldest first.
    """

    def __init__(self) -> None:
        self._running = 0
        self._running_max = 1
        self._waiting: deque[_Turn] = deque()

    def offer(self, turn: _Turn, waiting_max: int, running_max: int) -> None:
        """Take a request; at most `waiting_max` may wait while `running_max` run."""
        turn.frames = self
        self._running_max = running_max
        self._waiting.append(turn)
        self._next()
        while len(self._waiting) > waiting_max:
            self._waiting.popleft().drop(f"request was dropped for newer ones: at most {waiting_max} may wait")

    def ended(self) -> None:
        """A running request has ended."""
        self._running -= 1
        self._next()

    def _next(self) -> None:
        while self._waiting and self._running < self._running_max:
            turn = self._waiting.popleft()
            self._running += 1
            try:
                turn.submit()
            except Exception as error:  # supervisor: a failing request must not end the stream
                turn.frames = None
                self._running -= 1
                turn.fail(error)
