"""One instance in the child: takes batches from its socket, runs them, and sends the results."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from forebay.core.serving.config import Datatype
from forebay.engines.tensor.gpus import broken
from forebay.engines.tensor.protocol import Array, Backend, Request, Response, Rows, Stack
from forebay.modelserver.process.channel import Channel, Received
from forebay.modelserver.process.child import outgoing
from forebay.modelserver.process.child.arrays import BadTensor, array_of
from forebay.modelserver.process.messages import Answered, Ask, Emitted, Execute, Finished, Piece, Ping, ToChild
from forebay.modelserver.process.segments import SegmentBroken

EXIT_BROKEN: Final = 3


class _Batch:
    """The open requests of a batch, which may outlive it."""

    __slots__ = ("answered", "cancelled", "infer_ns", "number", "open", "start_ns")

    def __init__(self, number: int, size: int, cancelled: set[int]) -> None:
        self.number = number
        self.open = set(range(size))
        self.answered = 0
        """The first requests, which have been answered together."""
        self.cancelled = cancelled
        self.start_ns = self.infer_ns = time.monotonic_ns()

    def times(self, output_ns: int) -> tuple[int, int, int, int]:
        """As in `Finished`, now; `output_ns` is when the outputs were made."""
        now_ns = time.monotonic_ns()
        return self.start_ns, self.infer_ns - self.start_ns, output_ns - self.infer_ns, now_ns - output_ns


class Instance:
    """One instance; `run` has a thread to itself."""

    def __init__(
        self, number: int, channel: Channel[ToChild], backend: Backend, declared: Mapping[str, Datatype]
    ) -> None:
        self.channel = channel
        self._number = number
        self._backend = backend
        self._declared = declared
        self._batches: dict[int, _Batch] = {}
        self._latest = 0
        self._early: dict[int, set[int]] = {}
        """Cancelled requests of batches that have not begun, by batch."""
        self._lock = threading.Lock()
        """Held while a batch begins or a request is cancelled."""

    def run(self) -> None:
        """Run batches until the server closes the socket."""
        try:
            while True:
                received = self.channel.receive()
                if not isinstance(received.message, Ping):  # which only says what to forget
                    self._execute(received)
                del received
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the instance was removed, or the server is gone
        except BaseException:  # supervisor: the server must not be left waiting for this instance
            traceback.print_exc()
            flush()
            os._exit(EXIT_BROKEN)
        finally:
            self.channel.close()

    def cancel(self, batch: int, index: int) -> None:
        """A request was cancelled, perhaps before its batch began. Called in the thread of the control channel."""
        with self._lock:
            known = self._batches.get(batch)
            if known is not None:
                known.cancelled.add(index)
            elif batch > self._latest:
                self._early.setdefault(batch, set()).add(index)

    def _execute(self, received: Received[ToChild]) -> None:
        message = received.message
        assert isinstance(message, Execute)
        batch = self._begin(message)
        requests: Sequence[Request] = ()
        responses: Sequence[Response | None] = ()
        error = ""
        try:
            requests = _requests(message, received.parts, batch)
            batch.infer_ns = time.monotonic_ns()
            responses = self._backend.execute(self._number, requests, partial(self._emit, batch))
            left = len(requests) - batch.answered
            if len(responses) != left:
                raise BadTensor(f"the model gave {len(responses)} responses to {left} requests")
        except BadTensor as bad:
            error = outgoing.error_text(str(bad))
        except BaseException as raised:  # whatever a model raises, SystemExit included, fails its batch
            traceback.print_exc()
            error = outgoing.error_text(str(raised)) or type(raised).__name__
        output_ns = time.monotonic_ns()
        last = (bool(error) or _failed(responses)) and broken()
        if error:
            responses = ()
        self._finish(batch, responses)
        try:
            told, parcel = outgoing.finished(self.channel, responses, self._declared)
        except (OSError, SegmentBroken) as failed:
            error = f"the outputs cannot be sent: {failed}"
            told, parcel = outgoing.finished(self.channel, (), {})
        received.parts.clear()
        requests = (
            responses
        ) = ()  # drops the last references to the inputs, usually: their leases are returned with this packet
        replies, columns, sizes = told
        finished = Finished(batch.number, replies, *batch.times(output_ns), columns, sizes, error, last)
        self.channel.send(*self.channel.pack(finished, parcel))
        if last:
            _leave()

    def _begin(self, message: Execute) -> _Batch:
        number = message.batch
        with self._lock:
            self._latest = number
            batch = self._batches[number] = _Batch(
                number, len(message.sizes or message.asks), self._early.pop(number, set())
            )
        return batch

    def _finish(self, batch: _Batch, responses: Sequence[Response | None]) -> None:
        """Remove the requests that end with the batch."""
        if type(responses) is Rows:
            batch.open.clear()
        for index in list(batch.open):
            place = index - batch.answered
            if place >= len(responses) or responses[place] is not None:
                batch.open.discard(index)
        if not batch.open:
            self._batches.pop(batch.number, None)

    def _emit(self, batch: _Batch, index: int, response: Response | Sequence[Response] | None, final: bool) -> None:
        """Send a streamed response. Called by the backend in any thread, during the batch or after it."""
        if response is not None and not isinstance(response, Response):
            self._answer(batch, response)
            return
        if index not in batch.open:
            return  # it has ended, or its batch has failed
        if final:
            batch.open.discard(index)
        self.channel.wait_for_credit()
        held = response is not None
        try:
            (reply,), parcel = outgoing.replies(self.channel, [response], self._declared, held=held)
        except (OSError, SegmentBroken) as failed:
            response = Response(error=f"the outputs cannot be sent: {failed}")
            (reply,), parcel = outgoing.replies(self.channel, [response], {}, held=held)
        self.channel.send(*self.channel.pack(Emitted(batch.number, index, reply, final), parcel))
        if response is not None and response.error and broken():
            _leave()
        if not batch.open:
            self._batches.pop(batch.number, None)

    def _answer(self, batch: _Batch, responses: Sequence[Response]) -> None:
        """Answer the first requests of a running batch that have no response yet."""
        output_ns = time.monotonic_ns()
        first, batch.answered = batch.answered, batch.answered + len(responses)
        batch.open.difference_update(range(first, batch.answered))
        try:
            told, parcel = outgoing.finished(self.channel, responses, self._declared)
        except (OSError, SegmentBroken) as failed:
            failures = [Response(error=f"the outputs cannot be sent: {failed}")] * len(responses)
            told, parcel = outgoing.finished(self.channel, failures, {})
        replies, columns, sizes = told
        answered = Answered(batch.number, replies, *batch.times(output_ns), columns, sizes)
        self.channel.send(*self.channel.pack(answered, parcel))
        os.sched_yield()  # on a core that both share, the server would wait for the end of this process's turn


def flush() -> None:
    """Write what is still buffered of the model's output, unless it has closed that."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _failed(responses: Sequence[Response | None]) -> bool:
    return type(responses) is not Rows and any(each is not None and each.error for each in responses)


def _leave() -> None:
    """Exit: after a GPU fault, no batch of this process can succeed any more. The server starts another one."""
    print("the process cannot use its GPU any more after a fault: it is replaced", file=sys.stderr, flush=True)
    os._exit(EXIT_BROKEN)


def _requests(message: Execute, parts: list[memoryview], batch: _Batch) -> Sequence[Request]:
    """The requests in the backend's form. Raises `BadTensor`."""
    asks = message.asks
    if message.sizes:
        inputs = _arrays(message.columns, parts)
        if len(asks) == 1:
            asks = asks * len(message.sizes)
        return Stack(inputs, message.sizes, [ask.wanted for ask in asks], partial(_request, asks, batch))
    return [_request(asks, batch, index, _arrays(ask.inputs, parts)) for index, ask in enumerate(asks)]


def _arrays(pieces: Sequence[Piece], parts: list[memoryview]) -> dict[str, Array]:
    return {piece.name: array_of(piece, parts[piece.part]) for piece in pieces}


def _request(asks: Sequence[Ask], batch: _Batch, index: int, inputs: dict[str, Array]) -> Request:
    ask = asks[index]
    return Request(
        ask.id,
        inputs,
        ask.wanted,
        ask.parameters,
        ask.correlation_id,
        ask.start,
        ask.end,
        ask.timeout_us,
        ask.priority,
        partial(batch.cancelled.__contains__, index),
    )
