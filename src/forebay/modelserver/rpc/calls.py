"""gRPC calls: request headers, message assembly, and how calls end."""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import structlog
from google.protobuf.message import DecodeError

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse
from forebay.modelserver.ports import Models
from forebay.modelserver.process.segments import STAGED_BYTES_MIN
from forebay.modelserver.regions import SharedRegions
from forebay.modelserver.rpc.walking import check_fields, raw_begins
from forebay.wire.http2 import grpc
from forebay.wire.http2.headers import Header, well_formed, written
from forebay.wire.http2.session import Session
from forebay.wire.http2.streams import Stream
from forebay.wire.oip.fields import invalid
from forebay.wire.oip.infer_request import RESERVED, RESERVED_PREFIX

CODES: Final = {
    Kind.UNKNOWN: grpc.UNKNOWN,
    Kind.INTERNAL: grpc.INTERNAL,
    Kind.NOT_FOUND: grpc.NOT_FOUND,
    Kind.INVALID_ARGUMENT: grpc.INVALID_ARGUMENT,
    Kind.UNAVAILABLE: grpc.UNAVAILABLE,
    Kind.UNSUPPORTED: grpc.UNIMPLEMENTED,
    Kind.ALREADY_EXISTS: grpc.ALREADY_EXISTS,
    Kind.CANCELLED: grpc.CANCELLED,
    Kind.DEADLINE_EXCEEDED: grpc.DEADLINE_EXCEEDED,
}
MESSAGES_BYTES_MAX: Final = 2 * 2**30
"""Limit of incomplete messages and those that wait to be decompressed, over all calls."""
PACKED_AT_ONCE_BYTES_MAX: Final = 65_536
UNPACKED_AT_ONCE_BYTES_MAX: Final = 8192
"""Compressing or decompressing this much takes milliseconds; more is left to a thread."""
WAITING_BYTES_MAX: Final = 512 * 2**20
"""Outputs, over all calls, that wait to be encoded in a thread."""
_DONE: Final = grpc.answer_tail(grpc.OK)
_PLAIN: Final = grpc.answer_head()
MESSAGE_TIMEOUT_S: Final = 300.0
"""A message must be complete this long after it began."""
DRAINING: Final = "the server is shutting down"
_CONTENT_TYPE: Final = b"application/grpc"
_ERROR_ENDS: Final = b"triton_grpc_error"
_OF_PROTOCOL: Final = (b":", b"grpc-")
"""Prefixes of headers that belong to the protocol, not to the caller."""
_OF_HTTP: Final = frozenset({b"te", b"content-type"})


class Head(NamedTuple):
    """What the headers of a call contain."""

    make: "Maker | None"
    """Creates the call; None: the call is rejected with `flaw`."""
    timeout_s: float | None = None
    coding: bytes = b""
    """Encoding of compressed requests."""
    packing: bytes = b""
    """Compression of responses; empty: none."""
    forwarded: tuple[tuple[str, str], ...] = ()
    """Headers that become request parameters."""
    error_ends: bool = False
    """On a stream: an error of a model ends it, with its status."""
    flaw: bytes = b""
    """Header block that rejects the call."""


Link: TypeAlias = Session[Head]
Maker: TypeAlias = "Callable[[RpcContext, Link, Stream, Head], Call]"
Methods: TypeAlias = Mapping[bytes, Maker]


@dataclass(slots=True)
class RpcContext:
    """Context that all calls share."""

    models: Models
    regions: SharedRegions
    log: structlog.stdlib.BoundLogger
    tasks: asyncio.TaskGroup
    message_bytes_max: int
    packing: bytes
    """Compression of responses for clients that accept it; empty: none."""
    forwarded: re.Pattern[str] | None
    methods: Methods = field(default_factory=dict)
    """By path."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    room: grpc.ReceiveBudget = field(default_factory=lambda: grpc.ReceiveBudget(MESSAGES_BYTES_MAX))
    apart: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lets one thread at a time compress, decompress or classify."""
    waiting_bytes: int = 0
    """Bytes of outputs that wait to be encoded in a thread."""
    draining: bool = False
    """The server is shutting down; the client of a new call does not know it yet."""

    async def pack(self, message: bytes, coding: bytes) -> bytes:
        """Compress and frame a message in a thread."""
        async with self.apart:
            return await asyncio.to_thread(grpc.packed, message, coding)

    async def unpack(self, message: bytes | memoryview, coding: bytes) -> bytes:
        """Decompress a message in a thread; it counts as being received until then. Raises `BadMessage`."""
        held = self.room.hold(0, len(message))
        try:
            async with self.apart:
                return await asyncio.to_thread(grpc.unpacked, message, coding, self.message_bytes_max)
        finally:
            self.room.hold(held, 0)

    def kept(self, response: InferResponse) -> InferResponse:
        """Copy a response for `write`. Raises `Refused` if too many wait."""
        if self.waiting_bytes and self.waiting_bytes + _size(response) > WAITING_BYTES_MAX:
            raise Refused(Kind.UNAVAILABLE, "too many large outputs are being classified")
        return response.copied()

    async def write(self, write: Callable[[InferResponse], bytes], response: InferResponse) -> bytes:
        """Encode a response that was `kept` in a thread. Raises what `write` does."""
        size = _size(response)
        self.waiting_bytes += size
        try:
            async with self.apart:
                found = await asyncio.to_thread(write, response)
        finally:
            self.waiting_bytes -= size
        return found

    def place(self, size: int, head: bytes) -> memoryview | None:
        """Memory for a request that models' processes can map; its first raw contents are aligned in it."""
        staging = self.regions.staging
        if staging is None or size < STAGED_BYTES_MIN:
            return None
        return staging.take(size, raw_begins(head, size))

    def read(self, headers: Sequence[Header]) -> Head | None:
        """Parse the headers of a call; None: they are malformed."""
        if not well_formed(headers):
            return None
        found = dict(headers)
        if found[b":method"] != b"POST":
            return Head(None, flaw=written([(b":status", b"405")]))
        if not found.get(b"content-type", b"").startswith(_CONTENT_TYPE):
            return Head(None, flaw=written([(b":status", b"415")]))
        make = self.methods.get(found[b":path"])
        if make is None:
            return _flawed(grpc.UNIMPLEMENTED, f"unknown method {found[b':path'].decode('latin-1')[:200]}")
        coding = found.get(b"grpc-encoding", b"identity")
        if coding != b"identity" and coding not in grpc.CODINGS:
            return _flawed(grpc.UNIMPLEMENTED, f"unsupported grpc-encoding {coding.decode('latin-1')[:200]}")
        timeout_s = None
        if b"grpc-timeout" in found:
            try:
                timeout_s = grpc.timeout_s(found[b"grpc-timeout"])
            except ValueError:
                return _flawed(grpc.INTERNAL, "invalid grpc-timeout")
        packing = self.packing
        if packing and packing not in found.get(b"grpc-accept-encoding", b"").replace(b" ", b"").split(b","):
            packing = b""
        return Head(
            make,
            timeout_s,
            b"" if coding == b"identity" else coding,
            packing,
            () if self.forwarded is None else _forwarded(headers, self.forwarded),
            found.get(_ERROR_ENDS) == b"true",
        )

    def begin(self, session: Link, stream: Stream, head: Head) -> "Call | None":
        """Start a call, or reject it."""
        if head.make is None:
            session.finish(stream, head.flaw)
            return None
        call = head.make(self, session, stream, head)
        if self.draining:
            call.on_drain()
        return call


def _size(response: InferResponse) -> int:
    return sum([len(tensor.data) for tensor in response.outputs])


def _flawed(code: int, text: str) -> Head:
    return Head(None, flaw=grpc.answer_tail(code, text, alone=True))


def _forwarded(headers: Sequence[Header], pattern: re.Pattern[str]) -> tuple[tuple[str, str], ...]:
    own = [pair for pair in headers if not pair[0].startswith(_OF_PROTOCOL) and pair[0] not in _OF_HTTP]
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in own]
    return tuple(pair for pair in pairs if pattern.search(pair[0]))


def forward(head: Head, request: InferRequest) -> None:
    """Turn headers into request parameters. Raises `Refused`."""
    for name, value in head.forwarded:
        if name in RESERVED or name.startswith(RESERVED_PREFIX):
            raise invalid(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        request.parameters[name] = value


class Call(ABC):
    """A call in progress: the `StreamHandler` of its stream. `over` once it has been answered, reset or timed out."""

    __slots__ = ("_held", "_messages", "_slow", "_timer", "begun", "context", "head", "over", "session", "stream")

    def __init__(self, context: RpcContext, session: Link, stream: Stream, head: Head) -> None:
        self.context = context
        self.session = session
        self.stream = stream
        self.head = head
        self.begun = False
        """Part of the response has been sent."""
        self.over = False
        self._messages: grpc.Messages | None = None
        self._held = 0
        """Bytes of received messages that cannot be served yet, as counted in the limit of all calls."""
        self._slow: asyncio.TimerHandle | None = None
        self._timer = None if head.timeout_s is None else context.loop.call_later(head.timeout_s, self._on_late)

    # --- for subclasses

    @abstractmethod
    def on_message(self, message: bytes | memoryview) -> None:
        """Serve the complete request message; may raise anything."""

    def _place(self) -> grpc.Place | None:
        """Where messages are put; None: wherever."""
        return None

    def on_gone(self) -> None:  # noqa: B027 - most need not do anything
        """The call was cancelled, or has timed out."""

    def on_drain(self) -> None:  # noqa: B027
        """The server is shutting down: calls that would never end must end."""

    # --- events

    def on_data(self, data: bytes | memoryview, ended: bool) -> None:
        """Assemble the message; it is served once the client has sent everything."""
        if self.over:
            return
        try:
            messages = self._messages
            if messages is None:
                size = len(data) - grpc.PREFIX_BYTES
                if ended and size >= 0 and grpc.PREFIX.unpack_from(data) == (0, size):
                    if size > self.context.message_bytes_max:
                        raise grpc.too_large(size, self.context.message_bytes_max)
                    self.on_message(data[grpc.PREFIX_BYTES :])
                    return
                messages = self._messages = grpc.Messages(self.context.message_bytes_max, self._place())
            self._collect(messages, data, ended)
            if not self.over:
                self._hold(messages)
        except Exception as error:  # supervisor: a bug costs one call
            self.fail(error)

    @abstractmethod
    def _collect(self, messages: grpc.Messages, data: bytes | memoryview, ended: bool) -> None:
        """Take bytes that are not exactly one whole message; may raise anything."""

    def _kept_bytes(self) -> int:
        """Size of whole messages that wait for others."""
        return 0

    def _hold(self, messages: grpc.Messages) -> None:
        """Account for incomplete messages, and time them out. Raises `BadMessage`."""
        size = messages.size + self._kept_bytes()
        if size or self._held:
            self._held = self.context.room.hold(self._held, size)
        if not size:
            if self._slow is not None:
                self._slow.cancel()
                self._slow = None
        elif self._slow is None:
            self._slow = self.context.loop.call_later(MESSAGE_TIMEOUT_S, self._on_slow, messages, messages.count)

    def _on_slow(self, messages: grpc.Messages, count: int) -> None:
        self._slow = None
        if not self.over:
            if messages.count == count:
                self.refuse(grpc.DEADLINE_EXCEEDED, f"a message was incomplete after {MESSAGE_TIMEOUT_S:g} s")
            else:
                self._hold(messages)

    def on_reset(self) -> None:
        """Drop the call: the client has reset it."""
        if not self.over:
            self._end()
            self.on_gone()

    def _on_late(self) -> None:
        if not self.over:
            self.refuse(grpc.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self.on_gone()

    # --- how a call ends

    def reply(self, message: bytes) -> None:
        """End with a response."""
        packing = self.head.packing
        if packing and len(message) > PACKED_AT_ONCE_BYTES_MAX:
            self.context.tasks.create_task(self._reply_packed(message))
            return
        self._end()
        if packing:
            self.session.answer(self.stream, grpc.answer_head(packing), grpc.packed(message, packing), _DONE)
        else:
            self.session.answer(self.stream, _PLAIN, grpc.framed(message), _DONE)
        self.session.wake()

    async def _reply_packed(self, message: bytes) -> None:
        data = await self.context.pack(message, self.head.packing)
        if not self.over:
            self._end()
            self.session.answer(self.stream, grpc.answer_head(self.head.packing), data, _DONE)
            self.session.wake()

    def fail(self, error: Exception) -> None:
        """End with the status for an error."""
        if isinstance(error, Refused):
            self.refuse(CODES[error.kind], error.text, error.retry_after_s)
        elif isinstance(error, grpc.BadMessage):
            self.refuse(error.code, str(error))
        elif isinstance(error, DecodeError):
            self.refuse(grpc.INVALID_ARGUMENT, "the request message cannot be parsed")
        else:
            self.context.log.error("request handling failed", exc_info=error)
            self.refuse(grpc.INTERNAL, "internal error")

    def refuse(self, code: int, text: str, retry_after_s: int = 0) -> None:
        """End with that status, after data already being sent. `retry_after_s` is a hint for the client; 0: none."""
        if not self.over:
            self._end()
            queue = self.stream.queue
            while len(queue) > 1:  # the first may have been sent in part
                queue.pop()
            self.session.finish(self.stream, grpc.answer_tail(code, text, retry_after_s, alone=not self.begun))
            self.session.wake()

    def _end(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._held:
            self._held = self.context.room.hold(self._held, 0)
        if self._slow is not None:
            self._slow.cancel()


class Unary(Call):
    """A call with a single request message."""

    __slots__ = ("_message", "_packed")

    def __init__(self, context: RpcContext, session: Link, stream: Stream, head: Head) -> None:
        super().__init__(context, session, stream, head)
        self._message: bytes | memoryview | None = None
        self._packed = False

    def _collect(self, messages: grpc.Messages, data: bytes | memoryview, ended: bool) -> None:
        messages.feed(data, self._keep)
        if ended:
            if self._message is None or messages.waiting:
                raise grpc.BadMessage(grpc.INTERNAL, "the request ends within its message")
            message, self._message = self._message, None
            if not self._packed:
                self.on_message(message)
            elif len(message) <= UNPACKED_AT_ONCE_BYTES_MAX:
                self.on_message(grpc.unpacked(message, self.head.coding, self.context.message_bytes_max))
            else:
                self.context.tasks.create_task(self._unpack(message))

    def _kept_bytes(self) -> int:
        return len(self._message) if self._message is not None else 0

    def _keep(self, message: bytes | memoryview, packed: bool) -> None:
        if self._message is not None:
            raise grpc.BadMessage(grpc.UNIMPLEMENTED, "this method takes a single message")
        self._message, self._packed = message, packed

    async def _unpack(self, message: bytes | memoryview) -> None:
        try:
            data = await self.context.unpack(message, self.head.coding)
            if not self.over:
                self.on_message(data)
        except Exception as error:  # supervisor: a bug costs one call
            self.fail(error)


class Method(NamedTuple):
    """A method whose response depends only on its message."""

    read: Callable[[bytes | memoryview], Any]
    answer: Callable[[Any], Any]
    """Returns the response, or a coroutine for it. May raise anything."""


class Answering(Unary):
    """A call answered at once, or after a task."""

    __slots__ = ("_method",)

    def __init__(self, method: Method, context: RpcContext, session: Link, stream: Stream, head: Head) -> None:
        super().__init__(context, session, stream, head)
        self._method = method

    def on_message(self, message: bytes | memoryview) -> None:
        """Answer."""
        check_fields(message)
        answer = self._method.answer(self._method.read(message))
        if asyncio.iscoroutine(answer):
            self.context.tasks.create_task(self._reply_later(answer))
        else:
            self.reply(answer.SerializeToString())

    async def _reply_later(self, answer: Any) -> None:
        """Runs to its end even if the call is cancelled."""
        try:
            message = (await answer).SerializeToString()
        except Exception as error:  # supervisor: a bug costs one call
            self.fail(error)
        else:
            if not self.over:
                self.reply(message)
