"""The server side of one HTTP/2 connection (RFC 9113), sans-IO: bytes in, bytes out, streams in between.

What a client can cost us is bounded. Flow control limits what it may send, and windows are reopened only for what was
consumed. Header blocks and streams are limited. Too many frames that carry nothing (`noise`) end the connection.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from forebay.wire.http2 import frames as h2
from forebay.wire.http2.frames import ProtocolViolation, check, unpadded
from forebay.wire.http2.headers import LIST_BYTES_MAX, BadBlock, Header, PartialBlock, requests
from forebay.wire.http2.noise import DATA_CREDIT, EXCUSING_BYTES, NOISE_PER_TICK, REQUEST_CREDIT, RESET_NOISE, Noise
from forebay.wire.http2.streams import EndedStreams, Stream, StreamHandler

H = TypeVar("H")
STREAM_WINDOW: Final = 4 * 2**20
CONNECTION_WINDOW: Final = 32 * 2**20
"""Bytes that clients may send before we consume them."""
STREAMS_MAX: Final = 10_000
"""Concurrent streams on a connection; clients limit themselves to fewer."""
JOINED_BYTES_MAX: Final = 16_384
"""What comes at once is joined to the beginning of a frame, if it is no more: else only the rest of that frame."""
_DRAIN_PING: Final = b"goodbye\0"


class Session(Generic[H]):
    """A connection. After `receive` or any sending call, write what is in `out`; if `over`, close the connection
    then.

    `read` converts the headers of a request to the value passed to `begin`, or returns None if they are malformed.
    `begin` is called for each request and returns its handler.
    """

    def __init__(
        self,
        read: Callable[[Sequence[Header]], H | None],
        begin: Callable[["Session[H]", Stream, H], StreamHandler | None],
    ) -> None:
        self._blocks = requests(read)
        self._begin = begin
        self.streams: dict[int, Stream] = {}
        self.out: list[bytes | memoryview] = []
        self.over = False
        self.started = False
        """The client has sent the connection preface."""
        self.paused = False
        """The transport's buffer is full: responses wait."""
        self.sent = 0
        """Bytes of response data sent so far, to detect stalled connections."""
        self.wake: Callable[[], None] = _nothing
        """Called when something is to be sent outside `receive`."""
        self.data_sent = False
        """Anything but acknowledgements has been sent since the last ping arrived."""
        self.on_ping: Callable[[], bool] = _fine
        """Called for each ping; False: one too many."""
        self._rest = b""
        self._last = 0
        self._ended_streams = EndedStreams()
        self._block: PartialBlock | None = None
        """A header block that awaits CONTINUATION."""
        self._window = self._stream_window = h2.WINDOW_START
        self._room, self._unread = CONNECTION_WINDOW, 0
        self._frame_max = h2.FRAME_BYTES_MAX
        self._waiting: dict[Stream, None] = {}
        """Streams that are blocked only by the connection's window or the transport."""
        self._noise = Noise()
        self._leaving = 0
        """1: the client was told that the connection is shutting down; 2: later streams are not served any more."""
        self.out.append(
            h2.settings({h2.STREAMS_MAX: STREAMS_MAX, h2.WINDOW: STREAM_WINDOW, h2.HEADER_LIST: LIST_BYTES_MAX})
            + h2.frame(h2.WINDOW_UPDATE, 0, 0, h2.U32.pack(CONNECTION_WINDOW - h2.WINDOW_START))
        )

    # --- receiving

    def receive(self, data: bytes) -> None:
        """Process received bytes, split anywhere."""
        if self.over:
            return
        at, rest = 0, self._rest
        try:
            if rest:
                at = self._missing(rest, data)
                if at:
                    self._read(rest + data[:at], 0)
                else:
                    data = rest + data
            at = self._read(data, at)
            self._rest = data[at:]
            self._noise.check()
        except ProtocolViolation as broken:
            self.end(broken.code, str(broken))

    def _missing(self, rest: bytes, data: bytes) -> int:
        """How much of the data completes the frame that has begun. 0: all is to be joined, as it is little, or too
        little for that.
        """
        if len(data) <= JOINED_BYTES_MAX or not self.started:
            return 0
        high, low, _, _, _ = h2.HEAD.unpack((rest + data[: h2.HEAD_BYTES])[: h2.HEAD_BYTES])
        missing: int = h2.HEAD_BYTES + (high << 16 | low) - len(rest)
        return missing if missing <= len(data) else 0

    def _read(self, data: bytes, at: int) -> int:
        """Process all complete frames from there on; returns where the first incomplete one begins."""
        size = len(data)
        if not self.started:
            at = len(h2.PREFACE)
            if data[:at] != h2.PREFACE[:size]:
                raise ProtocolViolation(h2.PROTOCOL_ERROR, "this is not HTTP/2")
            if size < at:
                return 0
            self.started = True
        view = memoryview(data)
        unpack = h2.HEAD.unpack_from
        while size - at >= h2.HEAD_BYTES and not self.over:
            high, low, kind, flags, id = unpack(data, at)
            length: int = high << 16 | low
            if length > h2.FRAME_BYTES_MAX:
                raise ProtocolViolation(
                    h2.FRAME_SIZE_ERROR, f"a frame has {length} bytes; {h2.FRAME_BYTES_MAX} are allowed"
                )
            start = at + h2.HEAD_BYTES
            end = start + length
            if end > size:
                break
            at = end
            id &= h2.ID_MAX
            if self._block is not None and kind != h2.CONTINUATION:
                raise ProtocolViolation(h2.PROTOCOL_ERROR, "a header block was interrupted")
            if kind == h2.DATA:
                self._on_data(id, flags, view[start:end], length)
            elif kind == h2.HEADERS:
                self._on_headers(id, flags, data[start:end])
            else:
                self._on_other(kind, flags, id, data[start:end])
        return at

    def _on_data(self, id: int, flags: int, body: memoryview, length: int) -> None:
        if not length and not flags & h2.END_STREAM:
            self._noise.add(1)
        if flags & h2.PADDED:
            if not length or body[0] >= length:
                raise ProtocolViolation(h2.PROTOCOL_ERROR, "a frame is all padding")
            body = body[1 : length - body[0]]
        self._room -= length
        if self._room < 0:
            raise ProtocolViolation(h2.FLOW_CONTROL_ERROR, "more data than the connection's window allows")
        stream = self.streams.get(id)
        ended = flags & h2.END_STREAM != 0
        if stream is None or stream.ended:
            self._give_room(length)
            self._on_stray(id, stream, ended)
            return
        code = stream.count(length, len(body), ended)
        if code:
            self.reset(stream, code)
            return
        if stream.handler is not None:
            stream.handler.on_data(body, ended)
        if not stream.held:
            self._take(stream)

    def _on_headers(self, id: int, flags: int, body: bytes) -> None:
        if flags & (h2.PADDED | h2.PRIORITISED):
            body = unpadded(id, flags, body)
        if flags & h2.END_HEADERS:
            self._on_block(id, flags, body)
        else:
            self._block = PartialBlock(id, flags, body)

    def _on_block(self, id: int, flags: int, block: bytes) -> None:
        """The header block of a request, or of its trailers, is complete."""
        try:
            head, left, trails = self._blocks.decode(block)
        except BadBlock as error:
            raise ProtocolViolation(h2.COMPRESSION_ERROR, f"headers cannot be decoded: {error}") from None
        ended = flags & h2.END_STREAM != 0
        if id <= self._last:
            self._on_trailers(id, ended and trails)
            return
        if not id % 2:
            raise ProtocolViolation(h2.PROTOCOL_ERROR, "clients open odd streams only")
        if self._leaving == 2:
            return  # the client was told to retry on another connection
        self._last = id
        stream = Stream(id, self._stream_window, STREAM_WINDOW, ended)
        stream.left = left
        if head is None or (ended and left > 0):
            self.reset(stream, h2.PROTOCOL_ERROR)
        elif len(self.streams) >= STREAMS_MAX:
            self.reset(stream, h2.REFUSED_STREAM)
        else:
            self.streams[id] = stream
            stream.handler = self._begin(self, stream, head)
            if ended and stream.handler is not None:
                stream.handler.on_data(b"", True)

    def _on_trailers(self, id: int, fine: bool) -> None:
        stream = self.streams.get(id)
        if stream is None or stream.ended:
            self._on_stray(id, stream, fine)
        elif not fine or stream.left > 0:
            self.reset(stream, h2.PROTOCOL_ERROR)
        else:
            stream.ended = True
            if stream.handler is not None:
                stream.handler.on_data(b"", True)

    def _on_other(self, kind: int, flags: int, id: int, body: bytes) -> None:
        self._noise.add(1)
        size = len(body)
        if kind == h2.WINDOW_UPDATE:
            check(size == 4, h2.FRAME_SIZE_ERROR)
            self._on_window(id, h2.U32.unpack(body)[0] & h2.WINDOW_MAX)
        elif kind == h2.RST_STREAM:
            check(size == 4, h2.FRAME_SIZE_ERROR)
            self._on_reset(id)
        elif kind == h2.PING:
            check(size == 8, h2.FRAME_SIZE_ERROR)
            check(id == 0)
            self._on_ping(flags, body)
        elif kind == h2.SETTINGS:
            check(id == 0)
            check(size % 6 == 0 and not (flags & h2.ACK and size), h2.FRAME_SIZE_ERROR)
            if not flags & h2.ACK:
                self._on_settings(body)
        elif kind == h2.CONTINUATION:
            self._on_continuation(id, flags, body)
        elif kind == h2.PRIORITY:
            check(id > 0)
            check(size == 5, h2.FRAME_SIZE_ERROR)
            check(h2.U32.unpack_from(body)[0] & h2.ID_MAX != id)
        elif kind == h2.GOAWAY:
            check(id == 0)
            check(size >= 8, h2.FRAME_SIZE_ERROR)
        elif kind == h2.PUSH_PROMISE:
            raise ProtocolViolation(h2.PROTOCOL_ERROR, "clients do not push")

    def _on_continuation(self, id: int, flags: int, body: bytes) -> None:
        block = self._block
        if block is None or id != block.stream:
            raise ProtocolViolation(h2.PROTOCOL_ERROR, "CONTINUATION of nothing")
        block.add(body)
        if flags & h2.END_HEADERS:
            self._block = None
            self._on_block(id, block.flags, bytes(block.data))

    def _on_reset(self, id: int) -> None:
        stream = self.streams.get(id)
        if stream is None:
            self._check_not_idle(id)
            self._ended_streams.expects(id, True)
            return
        self._noise.add(RESET_NOISE)
        self._drop(stream, told=True)

    def _on_ping(self, flags: int, body: bytes) -> None:
        if not flags & h2.ACK:
            if not self.on_ping():
                raise ProtocolViolation(h2.CALM_DOWN, "too_many_pings")
            self.data_sent = False
            self.out.append(h2.frame(h2.PING, h2.ACK, 0, body))
        elif body == _DRAIN_PING and self._leaving == 1:
            self.refuse()

    def _on_settings(self, body: bytes) -> None:
        for key, value in h2.SETTING.iter_unpack(body):
            if key == h2.WINDOW:
                check(value <= h2.WINDOW_MAX, h2.FLOW_CONTROL_ERROR)
                self._noise.add(len(self.streams) // 16)
                self._noise.check()
                change = value - self._stream_window
                self._stream_window = value
                for stream in self.streams.values():
                    stream.window += change
                    check(stream.window <= h2.WINDOW_MAX, h2.FLOW_CONTROL_ERROR)
                    if stream.window > 0 and stream.queue:
                        self._waiting[stream] = None
            elif key == h2.FRAME_SIZE:
                check(h2.FRAME_BYTES_MAX <= value < 2**24)
                self._frame_max = min(value, STREAM_WINDOW)
            elif key == h2.ENABLE_PUSH:
                check(value <= 1)
        # before any data: gRPC's library holds data to its old window until the acknowledgement, and ends the stream
        self.out.append(h2.frame(h2.SETTINGS, h2.ACK, 0))
        self._pump_all()

    def _on_window(self, id: int, more: int) -> None:
        if id == 0:
            check(more > 0)
            self._window += more
            check(self._window <= h2.WINDOW_MAX, h2.FLOW_CONTROL_ERROR)
            self._pump_all()
            return
        stream = self.streams.get(id)
        if stream is None:
            self._check_not_idle(id)
        elif not more or stream.window + more > h2.WINDOW_MAX:
            self.reset(stream, h2.FLOW_CONTROL_ERROR if more else h2.PROTOCOL_ERROR)
        else:
            stream.window += more
            if stream.queue:
                self._pump(stream)

    def _on_stray(self, id: int, stream: Stream | None, ended: bool) -> None:
        """Data or headers on a stream that the client has ended, or that is not open any more."""
        self._check_not_idle(id)
        self._noise.add(1)
        if stream is not None:
            self.reset(stream, h2.STREAM_CLOSED)
        elif id <= self._last and not self._ended_streams.expects(id, ended):
            raise ProtocolViolation(h2.STREAM_CLOSED, "a frame for a stream that is closed")

    def _check_not_idle(self, id: int) -> None:
        if not id or (id > self._last and self._leaving < 2):
            raise ProtocolViolation(h2.PROTOCOL_ERROR, "a frame for a stream that is not open")

    # --- flow control of what is received

    def release(self, stream: Stream) -> None:
        """The handler of a held stream can accept more."""
        stream.held = False
        self._take(stream)

    def _take(self, stream: Stream) -> None:
        """The data received on a stream was consumed: reopen the windows, once half of them is used."""
        count, stream.unread = stream.unread, 0
        self._give_room(count)
        if not stream.ended and stream.room <= STREAM_WINDOW // 2:
            more = STREAM_WINDOW - stream.room
            stream.room += more
            self.out.append(h2.frame(h2.WINDOW_UPDATE, 0, stream.id, h2.U32.pack(more)))

    def _give_room(self, count: int) -> None:
        self._unread += count
        if self._unread >= CONNECTION_WINDOW // 2:
            self._room += self._unread
            self.out.append(h2.frame(h2.WINDOW_UPDATE, 0, 0, h2.U32.pack(self._unread)))
            self._unread = 0

    # --- sending

    def answer(self, stream: Stream, head: bytes, message: bytes, tail: bytes) -> None:
        """Send a whole response: headers, data and trailers."""
        size = len(message)
        if size > self._frame_max or size > self._window or size > stream.window or self.paused:
            self.head(stream, head)
            self.send(stream, message)
            self.finish(stream, tail)
            return
        id, pack = stream.id, h2.HEAD.pack
        stream.window -= size
        self._window -= size
        self.sent += size
        self.data_sent = True
        self.out.append(
            b"".join(
                (
                    pack(0, len(head), h2.HEADERS, h2.END_HEADERS, id), head,
                    pack(size >> 16, size & 0xFFFF, h2.DATA, 0, id), message,
                    pack(0, len(tail), h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, id), tail,
                )
            )
        )  # fmt: skip
        self._end(stream)

    def head(self, stream: Stream, block: bytes) -> None:
        """Send headers; more is to follow."""
        self.data_sent = True
        self.out.append(h2.frame(h2.HEADERS, h2.END_HEADERS, stream.id, block))

    def send(self, stream: Stream, data: bytes) -> None:
        """Send data, as far as flow control allows now; the rest is queued."""
        stream.queue.append(memoryview(data))
        stream.queued_bytes += len(data)
        self._pump(stream)

    def finish(self, stream: Stream, block: bytes) -> None:
        """Send the trailers that end the stream, once all queued data has been sent."""
        if stream.queue:
            stream.tail = block
        else:
            self._trail(stream, block)

    def reset(self, stream: Stream, code: int) -> None:
        """Reset a stream; its handler is notified."""
        self._noise.add(RESET_NOISE)
        self.out.append(h2.frame(h2.RST_STREAM, 0, stream.id, h2.U32.pack(code)))
        self._ended_streams.add(stream.id)
        self._drop(stream, told=True)

    def ping(self) -> None:
        """Check whether the client is alive: anything that it sends counts as an answer."""
        self.out.append(h2.frame(h2.PING, 0, 0, bytes(8)))

    def resume(self) -> None:
        """The transport accepts data again."""
        self.paused = False
        self._pump_all()

    def _pump(self, stream: Stream) -> None:
        queue = stream.queue
        while queue and not self.paused:
            piece = queue[0]
            size = min(len(piece), self._frame_max, self._window, stream.window)
            if size <= 0:
                break
            if size == len(piece):
                queue.popleft()
            else:
                queue[0], piece = piece[size:], piece[:size]
            stream.window -= size
            stream.queued_bytes -= size
            self._window -= size
            self.sent += size
            self.data_sent = True
            if size >= EXCUSING_BYTES:
                self._noise.forgive(DATA_CREDIT)
            self.out += (h2.HEAD.pack(size >> 16, size & 0xFFFF, h2.DATA, 0, stream.id), piece)
        self._waiting.pop(stream, None)
        if not queue:
            if stream.tail is not None:
                self._trail(stream, stream.tail)
        elif stream.window > 0:
            self._waiting[stream] = None

    def _pump_all(self) -> None:
        waiting = self._waiting
        while waiting and self._window > 0 and not self.paused:
            self._pump(next(iter(waiting)))

    def _trail(self, stream: Stream, block: bytes) -> None:
        self.data_sent = True
        self.out.append(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, stream.id, block))
        self._end(stream)

    def _end(self, stream: Stream) -> None:
        """Everything has been sent."""
        if not stream.ended:
            self.out.append(h2.frame(h2.RST_STREAM, 0, stream.id, h2.U32.pack(h2.NO_ERROR)))
            self._ended_streams.add(stream.id)
        self._noise.forgive(REQUEST_CREDIT)
        self._drop(stream, told=False)

    def _drop(self, stream: Stream, *, told: bool) -> None:
        self.streams.pop(stream.id, None)
        self._waiting.pop(stream, None)
        self._give_room(stream.unread)
        stream.unread, stream.ended = 0, True
        stream.queue.clear()
        handler, stream.handler = stream.handler, None
        if told and handler is not None:
            handler.on_reset()
        if self._leaving == 2 and not self.streams:
            self.over = True

    # --- shutdown

    def tick(self) -> None:
        """Time has passed: forgive some noise."""
        self._noise.forgive(NOISE_PER_TICK)

    def leave(self) -> None:
        """Tell the client to open no more streams; those already in transit are still served."""
        if not self._leaving:
            self._leaving = 1
            self.out.append(h2.goaway(h2.ID_MAX, h2.NO_ERROR) + h2.frame(h2.PING, 0, 0, _DRAIN_PING))

    def refuse(self) -> None:
        """Serve the open streams, and no new ones."""
        if self._leaving < 2:
            self._leaving = 2
            self.out.append(h2.goaway(self._last, h2.NO_ERROR))
            self.over = not self.streams

    def end(self, code: int, text: str) -> None:
        """Send GOAWAY and end the connection at once."""
        self.out.append(h2.goaway(self._last, code, text.encode()))
        self.lost()

    def lost(self) -> None:
        """The connection is gone: notify the handlers of all streams."""
        self.over = True
        self.wake, self.on_ping = _nothing, _fine
        for stream in list(self.streams.values()):
            self._drop(stream, told=True)


def _nothing() -> None:
    """Default `wake`: does nothing."""


def _fine() -> bool:
    """Default `on_ping`: allows every ping."""
    return True
