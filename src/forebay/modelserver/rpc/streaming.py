"""ModelStreamInfer: many requests on one stream, each with any number of answers.

Answers of ordinary models come in the order of their requests, whichever model they are for; those of decoupled
models come as they are made. What is wrong with one request is said in the stream, which goes on.

How much a stream may hold is bounded at both ends: requests are not read while too many are under way, and a client
that does not read its answers is cut off.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import structlog
from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferResponse, Ticket
from forebay.modelserver.ports import Models
from forebay.modelserver.regions import SharedRegions
from forebay.modelserver.rpc.requests import Asked, read_request
from forebay.modelserver.rpc.responses import FINAL, Writer
from forebay.wire.oip.documents import ERROR_CHARS_MAX

UNDER_WAY_MAX: Final = 1024
"""Requests of one stream that have no answer yet. More are not read before."""
UNSENT_MAX: Final = 4096
UNSENT_BYTES_MAX: Final = 256 * 2**20
"""Answers of one stream that its client has not taken. One more, and the stream ends."""
_BEHIND: Final = "the client does not read its answers: too many wait to be sent"


class Behind(Exception):  # noqa: N818 - states the condition
    """The client takes its answers too slowly."""


class Stream:
    """One stream, from its first request to its last answer."""

    def __init__(self, models: Models, memory: SharedRegions, log: structlog.stdlib.BoundLogger) -> None:
        self.models = models
        self.memory = memory
        self.log = log
        self._under_way: dict[_Turn, None] = {}
        self._ordered: deque[_Turn] = deque()
        """Turns of ordinary models, in the order in which their answers have to be sent."""
        self._frames: dict[tuple[str, str], Frames] = {}
        self._unsent: deque[Any] = deque()
        self._unsent_bytes = 0
        self._changed = asyncio.Event()
        self._behind = False
        """The client is told as soon as it takes what is on its way to it. Until then nothing more is kept for it."""

    async def run(self, requests: AsyncIterator[Any], write: Callable[[Any], Awaitable[None]]) -> None:
        """Serve until the client has sent its last request and got its last answer. Raises `Behind`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(requests))
                await self._write(write, reading)
        except* Behind:
            raise Behind(_BEHIND) from None
        finally:
            for other in list(self._under_way):
                other.cancel()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for message in requests:
            self._start(message)
            while self._behind or len(self._under_way) >= UNDER_WAY_MAX:
                self._changed.clear()
                await self._changed.wait()
        self._changed.set()

    def _start(self, message: Any) -> None:
        turn = _Turn(self, message)
        self._under_way[turn] = None
        try:
            view = self.models.view(message.model_name, message.model_version)
            turn.decoupled = view.config.decoupled
            if not turn.decoupled:
                self._ordered.append(turn)
            asked = read_request(message, view.config, self.memory)
            turn.expect(Writer(self.models, view, asked.wanted), asked)
            if asked.drop_oldest is None:
                turn.submit()
            else:
                key = message.model_name, message.model_version
                frames = self._frames.get(key)
                if frames is None:
                    frames = self._frames[key] = Frames()
                frames.offer(turn, asked.drop_oldest)
        except Exception as error:  # supervisor: a request costs its own answer, not the stream
            if not turn.decoupled and turn not in self._ordered:
                self._ordered.append(turn)
            turn.fail(error)

    # --- what turns tell

    def told(self, turn: "_Turn") -> None:
        """A turn has an answer, or has ended."""
        if turn.decoupled:
            self._send(turn)
        else:
            ordered = self._ordered
            while ordered and ordered[0].ended:
                self._send(ordered.popleft())
        if turn.ended:
            self._under_way.pop(turn, None)
        self._changed.set()

    def _send(self, turn: "_Turn") -> None:
        messages, turn.messages = turn.messages, []
        if self._behind:
            return
        for message in messages:
            self._unsent.append(message)
            self._unsent_bytes += message.ByteSize()
        unsent = len(self._unsent)
        if unsent > UNSENT_MAX or (self._unsent_bytes > UNSENT_BYTES_MAX and unsent > 1):
            self._behind = True
            self._unsent.clear()
            for other in list(self._under_way):
                other.cancel()

    async def _write(self, write: Callable[[Any], Awaitable[None]], reading: "asyncio.Task[None]") -> None:
        while True:
            if self._behind:
                raise Behind
            while self._unsent:
                message = self._unsent.popleft()
                self._unsent_bytes -= message.ByteSize()
                await write(message)
            if reading.done() and not self._under_way:
                return
            self._changed.clear()
            if not (self._behind or self._unsent or (reading.done() and not self._under_way)):
                await self._changed.wait()


class _Turn:
    """One request of a stream."""

    __slots__ = (
        "_asked",
        "_id",
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

    def __init__(self, stream: Stream, message: Any) -> None:
        self._stream = stream
        self._model = message.model_name
        self._version = message.model_version
        self._id = message.id
        self._asked: Asked | None = None
        self._writer: Writer | None = None
        self._ticket: Ticket | None = None
        self.decoupled = False
        self.ended = False
        self.frames: Frames | None = None
        self.messages: list[Any] = []
        """Answers that are not yet on their way."""

    def expect(self, writer: Writer, asked: Asked) -> None:
        """Know how answers are to be written."""
        self._writer = writer
        self._asked = asked

    def submit(self) -> None:
        """Hand the request to the models. Raises `Refused`."""
        assert self._asked is not None
        self._ticket = self._stream.models.infer(self._asked.request, self.on_response)

    def cancel(self) -> None:
        """Nobody waits for an answer any more."""
        if not self.ended and self._ticket is not None:
            self._ticket.cancel()

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """Note one answer."""
        if self.ended:
            return
        assert self._writer is not None
        assert self._asked is not None
        if response is not None:
            self._note(response, final)
        elif self.decoupled and final and self._asked.empty_final:
            message = pb.ModelStreamInferResponse()
            self._name(message.infer_response, final)
            self.messages.append(message)
        self._end_if(final)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        message = pb.ModelStreamInferResponse(error_message=self._text(error))
        message.infer_response.id = self._id
        self.messages.append(message)
        self._end_if(True)

    def _note(self, response: InferResponse, final: bool) -> None:
        assert self._writer is not None
        message = pb.ModelStreamInferResponse()
        answer = message.infer_response
        try:
            self._writer.fill(answer, response)
            answer.parameters[FINAL].bool_param = final
        except Exception as error:  # supervisor: a mistake with one answer must not stop those who call back
            message.Clear()
            message.error_message = self._text(error)
            self._name(message.infer_response, final)
        self.messages.append(message)

    def _name(self, answer: Any, final: bool) -> None:
        """Which request an answer without outputs belongs to."""
        answer.id = self._id
        answer.model_name = self._model
        answer.model_version = self._version
        answer.parameters[FINAL].bool_param = final

    def _text(self, error: Exception) -> str:
        if isinstance(error, Refused):
            return error.text[:ERROR_CHARS_MAX]
        self._stream.log.error("request handling failed", model=self._model[:200], exc_info=error)
        return "internal error"

    def _end_if(self, final: bool) -> None:
        self.ended = final
        self._stream.told(self)
        if final and self.frames is not None:
            self.frames.ended()


class Frames:
    """Requests of one stream for one model of which only the newest matter, such as pictures of a video.

    One runs; those that wait for it give way to newer ones, oldest first.
    """

    def __init__(self) -> None:
        self._running = False
        self._waiting: deque[_Turn] = deque()

    def offer(self, turn: _Turn, waiting_max: int) -> None:
        """Take a request that at most so many others may wait with."""
        turn.frames = self
        self._waiting.append(turn)
        if not self._running:
            self._next()
        while len(self._waiting) > waiting_max:
            dropped = self._waiting.popleft()
            dropped.frames = None
            dropped.fail(Refused(Kind.UNAVAILABLE, f"request was dropped: {waiting_max} newer ones may wait"))

    def ended(self) -> None:
        """The one that ran has its answer."""
        self._running = False
        self._next()

    def _next(self) -> None:
        while self._waiting and not self._running:
            turn = self._waiting.popleft()
            self._running = True
            try:
                turn.submit()
            except Exception as error:  # supervisor: a request costs its own answer, not the stream
                turn.frames, self._running = None, False
                turn.fail(error)
