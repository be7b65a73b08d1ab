"""The server's side of one instance: its batches and their listeners."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.process import encoding
from forebay.modelserver.process.channel import LENT_BYTES_MAX, ChannelBroken, Received
from forebay.modelserver.process.link import Link
from forebay.modelserver.process.messages import (
    Answered,
    Cancel,
    Emitted,
    Execute,
    Finished,
    Open,
    Ping,
    Result,
    TakeBack,
    ToServer,
)
from forebay.modelserver.process.segments import SegmentBroken
from forebay.modelserver.process.values import Answer, Done, Listener, Work

BATCHES_MAX: Final = 2
"""Batches in flight per instance: the second starts without a round trip when the first ends."""


class _Batch:
    """A batch in flight, or one that has finished but whose requests still get responses."""

    __slots__ = ("answered", "listener", "open", "size")

    def __init__(self, listener: Listener, size: int) -> None:
        self.answered = 0
        """The first requests, which have been answered before its end."""
        self.listener = listener
        self.open = set(range(size))
        self.size = size


class Lane:
    """One instance in one child."""

    def __init__(self, number: int, control: Link, on_lost: Callable[[str], None]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.number = number
        self.closing = False
        self.served = False
        """Whether a batch has finished."""
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._link = Link(ours, self._on_packet, on_lost)
        self._running: dict[int, _Batch] = {}
        self._lingering: dict[int, _Batch] = {}
        self._head_since = 0.0
        self._drained: asyncio.Future[None] | None = None
        self._returning = False
        self._link.channel.forgotten.on_more = partial(self._loop.call_soon_threadsafe, self._forget)
        with theirs:
            control.send(Open(number), fd=theirs.fileno())

    @property
    def outstanding(self) -> int:
        """Batches that have not finished."""
        return len(self._running)

    @property
    def open(self) -> bool:
        """Whether the child still owes a batch or responses."""
        return bool(self._running or self._lingering)

    def execute(self, batch: int, works: Sequence[Work], listener: Listener) -> None:
        """Send a batch. Raises `Refused` if there is no memory for it."""
        try:
            told, parcel = encoding.asks(self._link.channel, works)
        except (OSError, SegmentBroken) as error:
            raise Refused(Kind.UNAVAILABLE, f"no memory for the inputs of a batch: {error}") from error
        if not self._running:
            self._head_since = self._loop.time()
        self._running[batch] = _Batch(listener, len(works))
        self._link.send(Execute(batch, *told), parcel)

    def cancel(self, batch: int, index: int) -> bool:
        """Tell the child that a request was cancelled. False: this instance does not have it."""
        under_way = self._running.get(batch) or self._lingering.get(batch)
        if under_way is None or index not in under_way.open:
            return False
        self._control.send(Cancel(self.number, batch, index))
        return True

    def stuck_s(self, now: float) -> float:
        """How long the first batch has made no progress. Waiting for readers of its responses does not count."""
        if not self._running or self._link.channel.borrowed_bytes > LENT_BYTES_MAX // 2:
            return 0.0
        return now - self._head_since

    async def drained(self) -> None:
        """Take no more batches; wait until all open requests have ended, successfully or not."""
        self.closing = True
        if self.open:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def close(self, refused: Refused) -> None:
        """Close the lane; open requests fail with this error."""
        self.closing = True
        self._link.close()
        running, lingering = self._running, self._lingering
        self._running, self._lingering = {}, {}
        self._settle()
        soon = self._loop.call_soon  # a listener that raises must not keep others from being notified
        for batch in running.values():
            soon(batch.listener.on_done, Done((), 0, 0, 0, 0, refused))
        for batch in lingering.values():
            for index in sorted(batch.open):
                soon(batch.listener.on_response, index, Answer(error=refused), True)

    def _on_packet(self, received: Received[ToServer]) -> None:
        match received.message:
            case Finished() as finished:
                self._finished(finished, received)
            case Answered() as answered:
                self._answered(answered, received)
            case Emitted() as emitted:
                self._emitted(emitted, received)
            case unexpected:
                raise ChannelBroken(f"{type(unexpected).__name__} from an instance")

    def _finished(self, message: Finished, received: Received[ToServer]) -> None:
        batch = self._running.get(message.batch)
        count = len(message.sizes or message.replies)
        if batch is None or (not message.error and batch.answered + count != batch.size):
            raise ChannelBroken("the end of a batch that is not running")
        answers = _answers(message, received)
        if batch.answered and not message.error:
            answers = (None,) * batch.answered + answers
        del self._running[message.batch]
        self.served = True
        self.closing = self.closing or message.last
        self._head_since = self._loop.time()
        if not message.error and None in answers:
            batch.open -= {index for index, answer in enumerate(answers) if answer is not None}
            if batch.open:
                self._lingering[message.batch] = batch
        failure = Refused(Kind.INTERNAL, message.error) if message.error else None
        self._settle()
        self._forget()
        batch.listener.on_done(_done(message, answers, failure))

    def _answered(self, message: Answered, received: Received[ToServer]) -> None:
        batch = self._running.get(message.batch)
        answers = _answers(message, received)
        if batch is None or None in answers or not 0 < len(answers) < batch.size - batch.answered:
            raise ChannelBroken("answers to requests that are not running")
        first, end = batch.answered, batch.answered + len(answers)
        batch.answered = end
        batch.open.difference_update(range(first, end))
        self._head_since = self._loop.time()
        batch.listener.on_answers(first, _done(message, answers))

    def _emitted(self, message: Emitted, received: Received[ToServer]) -> None:
        batch = self._running.get(message.batch) or self._lingering.get(message.batch)
        if batch is None or message.index not in batch.open:
            return  # its batch has failed meanwhile
        self._link.channel.on_return = self._on_return  # from now on the child may block until we return memory
        reply = message.reply
        answer = None if reply is None else encoding.answer(reply, received.parts)
        self._head_since = self._loop.time()
        if message.final:
            batch.open.discard(message.index)
            if not batch.open and self._lingering.pop(message.batch, None) is not None:
                self._settle()
        batch.listener.on_response(message.index, answer, message.final)

    def _settle(self) -> None:
        if self._drained is not None and not self.open and not self._drained.done():
            self._drained.set_result(None)

    def _forget(self) -> None:
        """Have segments forgotten, unless a batch is running: many packets could pile up behind it."""
        if not self._running and self._link.channel.forgotten.ids:
            self._link.send(Ping())

    def _on_return(self) -> None:
        """There is memory to return that the child may be waiting for. Called in any thread."""
        if not self._returning:
            self._returning = True
            self._loop.call_soon_threadsafe(self._return)

    def _return(self) -> None:
        self._returning = False
        leases = self._link.channel.returns()
        if leases:
            self._control.send(TakeBack(self.number, leases))


def _answers(message: Result, received: Received[ToServer]) -> tuple[Answer | None, ...]:
    """Raises `ChannelBroken`."""
    if message.sizes:
        return encoding.answers(message.columns, message.sizes, received.parts)
    return tuple([None if reply is None else encoding.answer(reply, received.parts) for reply in message.replies])


def _done(message: Result, answers: tuple[Answer | None, ...], failure: Refused | None = None) -> Done:
    return Done(
        answers,
        message.compute_start_ns,
        message.compute_input_ns,
        message.compute_infer_ns,
        message.compute_output_ns,
        failure,
    )
