"""The server's end of a channel, on the event loop."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from forebay.modelserver.process.channel import Channel, ChannelBroken, Parcel, Received
from forebay.modelserver.process.messages import ToChild, ToServer
from forebay.modelserver.process.segments import Sharing

BACKLOG_PACKETS_MAX: Final = 4096
"""A child that leaves so many packets unread counts as broken."""
UNREADABLE: Final = "the model process sent an invalid packet"


class Link:
    """Sends without blocking, dispatches received packets, and reports a lost channel once."""

    def __init__(
        self, sock: socket.socket, on_packet: Callable[[Received[ToServer]], None], on_lost: Callable[[str], None]
    ) -> None:
        sock.setblocking(False)
        self.channel = Channel[ToServer](sock, ToServer, Sharing.BOTH)
        self._on_packet = on_packet
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._fd = sock.fileno()
        self._backlog: deque[tuple[bytes, list[int]]] = deque()
        self.closed = False
        self._loop.add_reader(self._fd, self._readable)

    def send(self, message: ToChild, parcel: Parcel | None = None, fd: int = -1) -> None:
        """Send a message and optionally a descriptor. Does nothing once the link is lost or closed."""
        if self.closed:
            return
        packet, fds = self.channel.pack(message, parcel)
        if fd >= 0:
            fds = [*fds, fd]
        if self._backlog:
            self._queue(packet, fds)
            return
        try:
            self.channel.send(packet, fds)
        except BlockingIOError:
            self._queue(packet, fds)
            self._loop.add_writer(self._fd, self._writable)
        except OSError as error:
            self._lose(f"cannot send to the model process: {error}")

    def close(self) -> None:
        """Close without calling `on_lost`."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            for _, fds in self._backlog:
                _close(fds)
            self._backlog.clear()
            self.channel.close()

    def _queue(self, packet: bytes, fds: list[int]) -> None:
        if len(self._backlog) >= BACKLOG_PACKETS_MAX:
            self._lose("the model process does not read its packets")
        else:
            self._backlog.append((packet, [os.dup(fd) for fd in fds]))  # the owner may close the originals meanwhile

    def _writable(self) -> None:
        try:
            while self._backlog:
                self.channel.send(*self._backlog[0])
                _close(self._backlog.popleft()[1])
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"cannot send to the model process: {error}")
            return
        self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            received = self.channel.receive()
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._lose("the model process ended")
            return
        except ChannelBroken as broken:
            self._lose(f"{UNREADABLE}: {broken}")
            return
        try:
            self._on_packet(received)
        except ChannelBroken as broken:
            self._lose(f"{UNREADABLE}: {broken}")

    def _lose(self, why: str) -> None:
        if not self.closed:
            self.close()
            self._loop.call_soon(self._on_lost, why)  # deferred: the caller may be in the middle of a send


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
