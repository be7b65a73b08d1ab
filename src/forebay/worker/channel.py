"""The messages between worker and engine child. A frame holds a sequence of them: each step costs one frame."""

from collections.abc import Sequence

import msgspec

from forebay.engines.protocol import Cached, EngineInfo, EngineLoad, Event, Work
from forebay.wire.frames import frame


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the messages that are not themselves values of the engine protocol."""


class Configure(_Message, frozen=True):
    """First message to the child: what to load."""

    engine: str
    artifact: str
    settings: dict[str, int | float | str | bool]


class Cancel(_Message, frozen=True):
    """Cancel a sequence."""

    id: str


class Ping(_Message, frozen=True):
    """Asks for a sign of life."""


class Stop(_Message, frozen=True):
    """Release everything and exit."""


class Ready(_Message, frozen=True):
    """The engine is loaded."""

    info: EngineInfo


class Broken(_Message, frozen=True):
    """The engine cannot start or continue; the child exits. `text` is for the operator."""

    text: str


class Progress(_Message, frozen=True):
    """The events of a step, and the engine's load after it."""

    events: tuple[Event, ...]
    load: EngineLoad
    cached: Cached | None = None


class Pong(_Message, frozen=True):
    """The response to all pings so far."""


ToChild = Configure | Work | Cancel | Ping | Stop
ToWorker = Ready | Broken | Progress | Pong

_encoder = msgspec.msgpack.Encoder()
decode_to_child = msgspec.msgpack.Decoder(tuple[ToChild, ...]).decode
decode_to_worker = msgspec.msgpack.Decoder(tuple[ToWorker, ...]).decode


def encode(messages: Sequence[ToChild] | Sequence[ToWorker]) -> bytes:
    """Messages as one frame."""
    return frame(_encoder.encode(messages))
