"""Large bodies that are read straight into memory of the handler's choice.

Otherwise a body is copied by the event loop, by the parser for each of its pieces, and once more when these are
joined: for tensors of half a megabyte that is a third of what a request costs.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.net.connection import Connection


class Intake:
    """Takes a connection's place as the protocol of its socket when its first such body arrives: then the connection
    can say where to read to (see `asyncio.BufferedProtocol`).

    The next head is read into `heads`, which is small: what comes of a body with it has to be copied.
    """

    __slots__ = ("_at", "_heads", "_line", "room")

    def __init__(self, line: "Connection", heads: memoryview) -> None:
        self._line = line
        self._heads = heads
        self._at = 0
        self.room: memoryview | None = None
        """For the body that is being read, and as long as this."""

    def begin(self, room: memoryview) -> None:
        """Read a body."""
        self.room = room
        self._at = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to read to."""
        return self._heads if self.room is None else self.room[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have been read."""
        room = self.room
        if room is None:
            self._line.data_received(bytes(self._heads[:nbytes]))
            return
        self._at += nbytes
        if self._at == len(room):
            self._line.arrived(room)

    def data_received(self, data: bytes | memoryview) -> None:
        """Bytes that were read elsewhere: with the head, or by a loop that does not know `get_buffer`."""
        room = self.room
        if room is None:
            self._line.data_received(bytes(data))
            return
        size = min(len(data), len(room) - self._at)
        room[self._at : self._at + size] = data[:size]
        self.buffer_updated(size)
        if size < len(data):
            self._line.data_received(bytes(data[size:]))

    def eof_received(self) -> bool:
        """Part of the protocol."""
        return self._line.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of the protocol."""
        self._line.connection_lost(exc)

    def pause_writing(self) -> None:
        """Part of the protocol."""
        self._line.pause_writing()

    def resume_writing(self) -> None:
        """Part of the protocol."""
        self._line.resume_writing()
