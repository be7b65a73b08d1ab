"""Streamed responses with backpressure."""

from collections import deque
from typing import Final

from forebay.core.errors import Code, Refusal
from forebay.net.exchange import Exchange
from forebay.net.replica_protocol import USAGE

NO_TOKENS: Final = (USAGE, b"0,0,0")
"""Trailer of streamed responses: speech is not counted in tokens."""

HELD_BYTES_MAX: Final = 32 * 2**20
"""Buffer limit for a slow client: some ten minutes of uncompressed speech, generated faster than played."""


class ResponseStream:
    """One streamed response, buffered while the client cannot take more."""

    __slots__ = ("_content_type", "_ended", "_exchange", "_held", "_held_bytes")

    def __init__(self, exchange: Exchange, content_type: bytes) -> None:
        self._exchange = exchange
        self._content_type = content_type
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._ended = False

    def add(self, piece: bytes) -> None:
        """Send a chunk. Raises `Refusal` with SLOW_CONSUMER if the buffer is full."""
        exchange = self._exchange
        if not exchange.started:
            exchange.start(200, [(b"content-type", self._content_type)])
            exchange.source = self
        if not piece:
            return
        if not self._held and not exchange.paused:
            exchange.write(piece)
            return
        self._held.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > HELD_BYTES_MAX:
            raise Refusal(Code.SLOW_CONSUMER)

    def end(self, last: bytes) -> None:
        """Send the last chunk, and end the response once the client has everything. Raises as `add`."""
        self.add(last)
        self._ended = True
        if not self._held:
            self._exchange.end([NO_TOKENS])

    def pause(self) -> None:
        """Called on backpressure: `add` buffers from now on."""

    def resume(self) -> None:
        """Send buffered chunks until the next backpressure."""
        exchange = self._exchange
        while self._held and not exchange.paused:
            piece = self._held.popleft()
            self._held_bytes -= len(piece)
            exchange.write(piece)
        if self._ended and not self._held:
            exchange.end([NO_TOKENS])
