"""The messages between the server and a model's child. Tensors in them are pieces of the packet's parts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from forebay.core.serving.config import Datatype, ModelConfig
from forebay.core.serving.errors import Kind
from forebay.core.serving.values import Parameter
from forebay.engines.tensor.measures import Family
from forebay.engines.tensor.protocol import Act, Loaded
from forebay.modelserver.process.segments import Sharing

WITHIN = 0
"""The part that lies within the packet itself; the others are segments."""


class Part(NamedTuple):
    """A segment that a packet's pieces lie in. Unless it is known its descriptor is with the packet."""

    lease: int
    segment: int
    size: int
    sharing: Sharing


class Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every packet has besides its message."""

    parts: tuple[Part, ...]
    lease: int
    """Of the data within the packet; 0: it is not to be given back."""
    returned: tuple[int, ...]
    """Leases."""
    forgotten: tuple[int, ...]
    """Segments that will not be used again."""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor: `size` bytes from `offset` of one of the packet's parts."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    part: int
    offset: int
    size: int


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of the messages."""


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request."""

    id: str
    inputs: tuple[Piece, ...]
    wanted: tuple[str, ...]
    parameters: dict[str, Parameter]
    correlation_id: int | str
    start: bool
    end: bool
    timeout_us: int
    priority: int


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One response. An error if `error` is not empty."""

    outputs: tuple[Piece, ...] = ()
    parameters: dict[str, Parameter] = {}
    error: str = ""
    kind: Kind = Kind.INTERNAL
    reschedule: bool = False


class Configure(_Message, frozen=True):
    """First message to a child: what to load, for which instance first."""

    backend: str
    config: ModelConfig
    folder: str
    instance: int
    document: str = ""
    """The configuration as clients see it, JSON."""


class Open(_Message, frozen=True):
    """A socket comes with this: an instance takes its batches from there until the other end closes it."""

    instance: int


class Execute(_Message, frozen=True):
    """A batch."""

    batch: int
    asks: tuple[Ask, ...]
    columns: tuple[Piece, ...] = ()
    sizes: tuple[int, ...] = ()
    """Instead of the inputs of `asks`: every input in one piece, and how many of its rows each request has."""


class Cancel(_Message, frozen=True):
    """Nobody waits for that request of a batch any more."""

    instance: int
    batch: int
    index: int


class TakeBack(_Message, frozen=True):
    """Leases that an instance's sender has to get back now: something waits for them."""

    instance: int
    leases: tuple[int, ...]


class Respond(_Message, frozen=True):
    """A response to a `Call`; without a reply only the end."""

    call: int
    reply: Reply | None
    final: bool


class Ping(_Message, frozen=True):
    """Asks for a sign of life."""


class Measure(_Message, frozen=True):
    """Asks for the model's own metrics."""


class Stop(_Message, frozen=True):
    """Release everything and exit."""


class Ready(_Message, frozen=True):
    """The model is loaded."""

    loaded: Loaded


class Broken(_Message, frozen=True):
    """The model cannot be loaded; the child exits. `text` is for the operator."""

    text: str


class Pong(_Message, frozen=True):
    """The answer to a ping."""


class Measured(_Message, frozen=True):
    """What the model's own metrics stand at: when asked, and once before the child ends as it was told."""

    families: tuple[Family, ...]


class Finished(_Message, frozen=True):
    """A batch is done; the times are as in `values.Done`."""

    batch: int
    replies: tuple[Reply | None, ...]
    compute_start_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int
    error: str = ""
    columns: tuple[Piece, ...] = ()
    sizes: tuple[int, ...] = ()
    """Instead of `replies`: every output in one piece, and how many of its rows each request has."""
    last: bool = False
    """The process ends after it."""


class Emitted(_Message, frozen=True):
    """A response of a request that is answered bit by bit."""

    batch: int
    index: int
    reply: Reply | None
    final: bool


class Call(_Message, frozen=True):
    """The model asks for another model."""

    call: int
    model: str
    version: int
    ask: Ask
    act: Act


class Withdraw(_Message, frozen=True):
    """The model does not wait for the answer to a `Call` any more; unless that has ended, an error ends it."""

    call: int


ToChild = Configure | Open | Execute | Cancel | TakeBack | Respond | Ping | Measure | Stop
ToServer = Ready | Broken | Pong | Measured | Finished | Emitted | Call | Withdraw


def packets_with(messages: Any) -> Callable[[memoryview], tuple[Head, Any]]:
    """What reads the head and the message of packets; `messages` is `ToChild` or `ToServer`."""
    return msgspec.msgpack.Decoder(tuple[Head, messages]).decode
