"""Messages between the server and a child. Tensors in them refer to the packet's parts."""

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
"""Number of the part inside the packet itself; all others are segments."""


class Part(NamedTuple):
    """A segment that a packet refers to. Its descriptor is sent along unless the receiver knows it."""

    lease: int
    segment: int
    size: int
    sharing: Sharing


class Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sent with every message."""

    parts: tuple[Part, ...]
    lease: int
    """Lease of the data inside the packet; 0: it is not lent."""
    returned: tuple[int, ...]
    """Leases that are returned."""
    forgotten: tuple[int, ...]
    """Segments that will not be used again."""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor: `size` bytes at `offset` of one of the packet's parts."""

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
    """One response; an error if `error` is not empty."""

    outputs: tuple[Piece, ...] = ()
    parameters: dict[str, Parameter] = {}
    error: str = ""
    kind: Kind = Kind.INTERNAL
    reschedule: bool = False


class Configure(_Message, frozen=True):
    """First message to a child: the model to load, and its first instance."""

    backend: str
    config: ModelConfig
    folder: str
    instance: int
    document: str = ""
    """The configuration document that clients see, as JSON."""
    steps: "tuple[Configure, ...]" = ()
    """For an ensemble: the models of its steps, in their order."""


class Open(_Message, frozen=True):
    """Sent with a socket, on which an instance takes batches until the other end closes it."""

    instance: int


class Execute(_Message, frozen=True):
    """A batch."""

    batch: int
    asks: tuple[Ask, ...]
    columns: tuple[Piece, ...] = ()
    sizes: tuple[int, ...] = ()
    """If given, `columns` replace the inputs of `asks`: one piece per input, with so many rows for each request. A
    single one of `asks` is then that of each request.
    """


class Cancel(_Message, frozen=True):
    """A request of a batch was cancelled."""

    instance: int
    batch: int
    index: int


class TakeBack(_Message, frozen=True):
    """Leases returned at once to an instance whose sender is blocked on them."""

    instance: int
    leases: tuple[int, ...]


class Respond(_Message, frozen=True):
    """A response to a `Call`; without a reply only its end."""

    call: int
    reply: Reply | None
    final: bool


class Ping(_Message, frozen=True):
    """Liveness check."""


class Measure(_Message, frozen=True):
    """Requests the model's custom metrics."""


class Stop(_Message, frozen=True):
    """Release everything and exit."""


class Ready(_Message, frozen=True):
    """The model is loaded."""

    loaded: Loaded


class Broken(_Message, frozen=True):
    """The model cannot be loaded, and the child exits. `text` is for the operator."""

    text: str


class Pong(_Message, frozen=True):
    """Reply to a ping."""


class Measured(_Message, frozen=True):
    """The model's custom metrics: sent on request, and once before an orderly exit."""

    families: tuple[Family, ...]


class Result(_Message, frozen=True):
    """What came of a batch, but for requests that were answered before; times as in `values.Done`."""

    batch: int
    replies: tuple[Reply | None, ...]
    compute_start_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int
    columns: tuple[Piece, ...] = ()
    sizes: tuple[int, ...] = ()
    """If given, `columns` replace `replies`: one piece per output, with so many rows for each request."""


class Answered(Result, frozen=True):
    """The first requests of a batch have ended, and it goes on."""


class Finished(Result, frozen=True):
    """A batch has finished."""

    error: str = ""
    last: bool = False
    """The process exits after this batch."""


class Emitted(_Message, frozen=True):
    """A streamed response."""

    batch: int
    index: int
    reply: Reply | None
    final: bool


class Call(_Message, frozen=True):
    """The model calls another model."""

    call: int
    model: str
    version: int
    ask: Ask
    act: Act


class Withdraw(_Message, frozen=True):
    """Cancels a `Call`; unless that has ended, it ends with an error."""

    call: int


ToChild = Configure | Open | Execute | Cancel | TakeBack | Respond | Ping | Measure | Stop
ToServer = Ready | Broken | Pong | Measured | Finished | Answered | Emitted | Call | Withdraw


def packets_with(messages: Any) -> Callable[[memoryview], tuple[Head, Any]]:
    """Decoder for the head and message of packets; `messages` is `ToChild` or `ToServer`."""
    return msgspec.msgpack.Decoder(tuple[Head, messages]).decode
