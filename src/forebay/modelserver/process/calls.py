"""A model's call to another model, on the server's side."""

from collections.abc import Callable
from typing import Final

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.process import encoding
from forebay.modelserver.process.channel import Received
from forebay.modelserver.process.link import Link
from forebay.modelserver.process.messages import Call, Reply, Respond, ToServer
from forebay.modelserver.process.segments import SegmentBroken
from forebay.modelserver.process.values import Answer, Work

CANCELLED: Final = "the call was cancelled by the model that made it"


class ModelCall:
    """Implements `values.Call`."""

    __slots__ = ("_link", "_number", "_open", "act", "model", "on_gone", "version", "work")

    def __init__(
        self, message: Call, received: Received[ToServer], link: Link, calls: "dict[int, ModelCall]"
    ) -> None:
        """Stays in `calls` until its final response. Raises `ChannelBroken`."""
        ask = message.ask
        self.model = message.model
        self.version = message.version
        self.act = message.act
        self.work = Work(
            ask.id,
            encoding.tensors(ask.inputs, received.parts),
            ask.wanted,
            ask.parameters,
            correlation_id=ask.correlation_id,
            start=ask.start,
            end=ask.end,
            timeout_us=ask.timeout_us,
            priority=ask.priority,
        )
        self.on_gone: Callable[[], None] | None = None
        self._number = message.call
        self._link = link
        self._open = calls
        calls[self._number] = self

    def respond(self, answer: Answer | None, final: bool) -> None:
        """Send a response; None: only the end. Ignored once the calling process is gone."""
        if final:
            self._open.pop(self._number, None)
        if self._link.closed:
            return
        if answer is None:
            self._link.send(Respond(self._number, None, final))
            return
        try:
            reply, parcel = encoding.reply(self._link.channel, answer)
        except (OSError, SegmentBroken) as error:
            self._link.send(Respond(self._number, Reply(error=f"no memory for the response: {error}"), final))
            return
        self._link.send(Respond(self._number, reply, final), parcel)


def cancel(calls: dict[int, ModelCall], number: int) -> None:
    """Cancel a call on behalf of the calling model; does nothing if it has ended."""
    call = calls.get(number)
    if call is not None and call.on_gone is not None:
        call.on_gone()
        call.respond(Answer(error=Refused(Kind.CANCELLED, CANCELLED)), True)


def withdraw(calls: dict[int, ModelCall]) -> None:
    """Cancel all calls of a process that is gone."""
    gone = list(calls.values())
    calls.clear()
    for call in gone:
        if call.on_gone is not None:
            call.on_gone()
