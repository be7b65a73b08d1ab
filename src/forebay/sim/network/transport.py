"""asyncio's transport over a simulated socket: the same callbacks, in the same order, as over a real one."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Final, cast

from forebay.sim.network.kernel import FIN, Socket
from forebay.sim.network.links import Link

READ_BYTES_MAX: Final = 262_144
"""Most bytes asyncio reads at once."""
CHOP_BITS: Final = 16
"""Chopped reads have at most 2**15 bytes, log-uniformly."""
HIGH_WATER_BYTES: Final = 65_536
"""Above this the protocol's writing is paused, until a quarter of it is left: asyncio's defaults."""

Address = tuple[str, int]


class Transport(asyncio.Transport):
    """The transport of one protocol, on a node. `chop`: deliver received data in pieces of random sizes."""

    __slots__ = (
        "_buffer",
        "_buffer_bytes",
        "_chop",
        "_closing",
        "_context",
        "_eof_in",
        "_eof_out",
        "_forget",
        "_high_water_bytes",
        "_loop",
        "_lost",
        "_low_water_bytes",
        "_paused",
        "_protocol",
        "_read_due",
        "_started",
        "_writing_paused",
        "node",
        "socket",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        node: str,
        link: Link,
        context: Context,
        *,
        names: tuple[Address, Address],
        chop: Random | None,
        forget: Callable[[], None],
    ) -> None:
        super().__init__({"sockname": names[0], "peername": names[1]})
        self.node = node
        self.socket = Socket(loop, link, context, self._woken)
        self._loop = loop
        self._context = context
        self._chop = chop
        self._forget = forget
        self._protocol: asyncio.Protocol
        self._started = False
        self._paused = False
        self._read_due = False
        self._closing = False
        self._lost = False
        self._eof_in = False
        self._eof_out = False
        self._writing_paused = False
        self._buffer: deque[memoryview] = deque()
        self._buffer_bytes = 0
        self._high_water_bytes = HIGH_WATER_BYTES
        self._low_water_bytes = HIGH_WATER_BYTES // 4

    def start(self, protocol: asyncio.BaseProtocol) -> None:
        """Tell the protocol of its connection soon, and read from then on."""
        self.set_protocol(protocol)
        self._soon(self._begin)

    def _begin(self) -> None:
        if self.socket.closed:  # the process has died meanwhile
            return
        self._protocol.connection_made(self)
        self._started = True
        self._read_soon()

    def _soon(self, what: Callable[..., None], *args: object) -> None:
        self._loop.call_soon(what, *args, context=self._context)

    def _woken(self) -> None:
        if self._buffer:
            self._flush()
        self._read()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Who hears of what comes from now on."""
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Who hears of what comes."""
        return self._protocol

    # --- reading

    def is_reading(self) -> bool:
        """Whether what comes is handed on."""
        return not (self._paused or self._closing)

    def pause_reading(self) -> None:
        """Hand nothing on for now; the other end feels it."""
        self._paused = True

    def resume_reading(self) -> None:
        """Hand on what comes."""
        self._paused = False
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._read_due and self.socket.readable:
            self._read_due = True
            self._soon(self._read_now)

    def _read_now(self) -> None:
        self._read_due = False
        self._read()

    def _read(self) -> None:
        if self._paused or self._closing or self._eof_in or not self._started:
            return
        size_max = READ_BYTES_MAX
        if self._chop is not None:
            size_max = 1 + self._chop.randrange(1 << self._chop.randrange(CHOP_BITS))
        try:
            data = self.socket.receive(size_max)
        except OSError as error:
            self._end(error)
            return
        if data:
            self._protocol.data_received(data)
            self._read_soon()
        elif data == FIN:
            self._eof_in = True
            if not self._protocol.eof_received():
                self.close()

    # --- writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")
        if self._eof_out:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._lost or not data:
            return
        rest = memoryview(data if isinstance(data, bytes) else bytes(data))
        if not self._buffer:
            try:
                sent = self.socket.send(rest)
            except OSError as error:
                self._end(error)
                return
            if sent == len(rest):
                return
            rest = rest[sent:]
        self._buffer.append(rest)
        self._buffer_bytes += len(rest)
        self._ask_to_pause()

    def _flush(self) -> None:
        buffer = self._buffer
        while buffer:
            first = buffer[0]
            try:
                sent = self.socket.send(first)
            except OSError as error:
                self._end(error)
                return
            self._buffer_bytes -= sent
            if sent < len(first):
                buffer[0] = first[sent:]
                break
            buffer.popleft()
        if self._writing_paused and self._buffer_bytes <= self._low_water_bytes:
            self._writing_paused = False
            self._protocol.resume_writing()  # the protocol may write here
        if not buffer:
            if self._closing:
                self._say_lost(None)
            elif self._eof_out:
                self.socket.shut_down()

    def can_write_eof(self) -> bool:
        """Half-closing is supported."""
        return True

    def write_eof(self) -> None:
        if self._closing or self._eof_out:
            return
        self._eof_out = True
        if not self._buffer:
            self.socket.shut_down()

    def get_write_buffer_size(self) -> int:
        return self._buffer_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_water_bytes, self._high_water_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high_water_bytes, self._low_water_bytes = high, low
        self._ask_to_pause()

    def _ask_to_pause(self) -> None:
        if self._buffer_bytes > self._high_water_bytes and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    # --- the end

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if not self._buffer:
            self._lose(None)

    def abort(self) -> None:
        self._end(None)

    def _end(self, error: OSError | None) -> None:
        self._buffer.clear()
        self._buffer_bytes = 0
        self._closing = True
        self._lose(error)

    def _lose(self, error: OSError | None) -> None:
        if not self._lost:
            self._lost = True
            self._soon(self._say_lost, error)

    def die(self) -> None:
        """The process has ended: close its socket without notifying its protocol."""
        self.socket.woken = _nothing
        self._closing = True
        self._buffer.clear()
        self.socket.close()
        self._forget()

    def _say_lost(self, error: OSError | None) -> None:
        self._lost = True
        try:
            self._protocol.connection_lost(error)
        finally:
            self.socket.close()
            self._forget()


def _nothing() -> None:
    """No effect: the process has ended."""
