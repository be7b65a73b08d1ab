"""One end of a simulated TCP connection, as a program sees it from its kernel.

Bytes keep their order. At most a window of them is in transit or unread, after which no more are accepted. Closing a
socket sends a FIN, or an RST if bytes were left unread; bytes that arrive later are answered with an RST. A reset is
noticed when reading, after the bytes before it, or when writing. Simplifications: acknowledgements take no time, and
a connection whose bytes do not arrive is never given up, which Linux does after a quarter of an hour.
"""

import errno
import os
from asyncio import AbstractEventLoop, Handle
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Final

from forebay.sim.network.links import Link

WINDOW_BYTES: Final = 262_144
SEGMENT_BYTES_MAX: Final = 65_536
"""Data is delivered in segments of this size, so that slow links deliver gradually."""
FIN: Final = b""


class Socket:
    """One end. `woken` is called by the loop in `context` when reading or writing may have become possible."""

    __slots__ = (
        "_broken",
        "_closed",
        "_context",
        "_fin_in",
        "_fin_out",
        "_last_at",
        "_loop",
        "_out_bytes",
        "_received",
        "_waking",
        "_wants_room",
        "_wire",
        "link",
        "peer",
        "silent",
        "woken",
    )

    def __init__(self, loop: AbstractEventLoop, link: Link, context: Context, woken: Callable[[], None]) -> None:
        self.link = link
        """The link towards the peer."""
        self.peer: Socket
        self.woken = woken
        self.silent = False
        """The host has vanished silently."""
        self._loop = loop
        self._context = context
        self._wire: deque[tuple[float, bytes]] = deque()  # data in transit to this end, with arrival times
        self._received: deque[bytes] = deque()
        self._waking: Handle | None = None
        self._out_bytes = 0
        self._last_at = 0.0
        self._wants_room = False
        self._fin_in = self._fin_out = self._broken = self._closed = False

    # --- for the transport

    @property
    def readable(self) -> bool:
        """Whether reading would return something."""
        return bool(self._received) or self._fin_in or self._broken

    @property
    def closed(self) -> bool:
        """Whether the program has closed it, or has ended."""
        return self._closed

    def send(self, data: bytes | memoryview) -> int:
        """Accept bytes, at most what there is room for; returns how many. After a partial write, `woken` signals
        room.

        Raises ConnectionResetError or BrokenPipeError.
        """
        size = len(data)
        if self._broken:
            raise _error(errno.EPIPE if self._fin_in else errno.ECONNRESET)
        if self._closed or self.silent:
            return size
        room = WINDOW_BYTES - self._out_bytes
        if size <= room and size <= SEGMENT_BYTES_MAX:
            self._put(bytes(data))
            return size
        taken = min(size, room)
        for start in range(0, taken, SEGMENT_BYTES_MAX):
            self._put(bytes(data[start : min(start + SEGMENT_BYTES_MAX, taken)]))
        self._wants_room = taken < size
        return taken

    def receive(self, size_max: int) -> bytes | None:
        """Read 1 to `size_max` bytes; `FIN` at the end, None if there is nothing yet. Raises ConnectionResetError."""
        received = self._received
        if not received:
            if self._fin_in:
                return FIN
            if self._broken:
                raise _error(errno.ECONNRESET)
            return None
        data = received.popleft()
        if len(data) > size_max:
            received.appendleft(data[size_max:])
            data = data[:size_max]
        elif received and len(data) + len(received[0]) <= size_max:
            parts, size = [data], len(data)
            while received and size + len(received[0]) <= size_max:
                size += len(received[0])
                parts.append(received.popleft())
            data = b"".join(parts)
        self.peer._make_room(len(data))
        return data

    def shut_down(self) -> None:
        """Send a FIN."""
        if not (self._fin_out or self._broken or self.silent):
            self._put(FIN)
        self._fin_out = True

    def close(self) -> None:
        """Close it; accepted bytes are still delivered."""
        if self._closed:
            return
        unread = bool(self._received)
        if unread:
            self._say_reset()
            self._fin_out = True
        self.shut_down()
        self._closed = True
        self._received.clear()

    # --- for the network

    def break_off(self) -> None:
        """Inject a reset; data in transit to this end is lost."""
        self._wire.clear()
        self._reset()

    def come_back(self) -> None:
        """The host is back, without any connections."""
        self.silent = False
        self._fin_out = self._closed = True
        self.look()

    def hasten(self) -> None:
        """Deliver all data in transit now."""
        now = self._loop.time()
        self._wire = deque((min(at, now), data) for at, data in self._wire)
        self.peer._last_at = min(self.peer._last_at, now)
        self.look()

    def look(self) -> None:
        """Re-check arrivals: the link may have been restored."""
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        if self._wire:
            self._wake_at(self._wire[0][0])

    # --- inside

    def _arrival_s(self, size: int) -> float:
        link, now = self.link, self._loop.time()
        at = now if link.plain else link.arrival_s(now, size)
        self._last_at = at = max(at, self._last_at)
        return at

    def _put(self, data: bytes) -> None:
        at = self._arrival_s(len(data))
        self._out_bytes += len(data)
        peer = self.peer
        peer._wire.append((at, data))
        if peer._waking is None:
            peer._wake_at(at)

    def _wake_at(self, at: float) -> None:
        loop = self._loop
        if at <= loop.time():
            self._waking = loop.call_soon(self._arrive, context=self._context)
        else:
            self._waking = loop.call_at(at, self._arrive, context=self._context)

    def _arrive(self) -> None:
        self._waking = None
        if self._take_due():
            self.woken()

    def _take_due(self) -> bool:
        """Receive arrived data; True if the program must be notified."""
        wire, now = self._wire, self._loop.time()
        if self.silent or self.peer.link.cut:
            return False  # TCP retransmits until it arrives
        refused = heard = False
        while wire and wire[0][0] <= now:
            data = wire.popleft()[1]
            if self._closed or self._broken:
                refused = refused or data != FIN
                continue
            heard = True
            if data == FIN:
                self._fin_in = True
            else:
                self._received.append(data)
        if wire:
            self._wake_at(wire[0][0])
        if refused:
            self._say_reset()
        return heard

    def _make_room(self, size: int) -> None:
        self._out_bytes -= size
        if self._wants_room and self._out_bytes <= WINDOW_BYTES // 2:
            self._wants_room = False
            self._loop.call_soon(self.woken, context=self._context)

    def _say_reset(self) -> None:
        loop = self._loop
        if not (self.link.cut or self.silent):
            at = self._arrival_s(0)
            if at <= loop.time():
                loop.call_soon(self.peer._hear_reset, context=self.peer._context)
            else:
                loop.call_at(at, self.peer._hear_reset, context=self.peer._context)

    def _hear_reset(self) -> None:
        if not (self.silent or self.peer.link.cut):  # resets are not retransmitted
            self._take_due()
            self._reset()

    def _reset(self) -> None:
        if not (self._broken or self._closed):
            self._broken = True
            self._loop.call_soon(self.woken, context=self._context)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))  # Python makes it a ConnectionResetError or a BrokenPipeError
